"""The shared engine's PyTorch operators: `opcheck` of each as networks call it, and specifications that survive
encoding."""

from typing import Any

import pytest
import torch
from helpers import add_conv_biases, freeze_norms, freeze_parameters, plan_stage
from subjects import KINDS, Subject
from test_parts import Block, randomized
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from efficient_densenet.engine.stage import spec
from efficient_densenet.engine.stem import spec as stem_spec
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # raised by opcheck
OPERATORS = torch.ops.efficient_densenet
CASES: dict[str, dict[str, Any]] = {
    "block": {"bn_size": 0, "biases": True},
    "block of volumes with dropout": {"dims": 3, "drop_rate": 0.4},
    "block of other authors": {"biases": True},
    "transition": {"drop_rate": 0.4, "keep_bottleneck": True, "biases": True},
    "transition of volumes": {"dims": 3, "trainable": "norm"},
    "transition in bfloat16": {"dtype": torch.bfloat16, "memory_format": torch.channels_last},
    "transition, of which the input alone": {"trainable": "nothing"},
    "norm": {"frozen": "", "autocast": True, "dtype": torch.float32, "activation": "elu"},
    "features too": {"dims": 1, "frozen": "norm2", "keep_bottleneck": True, "biases": True},
    "consumer": {"frozen": "", "biases": True},
    "apart": {"needs_grad_input": False},
    "stem": {"biases": True},
    "stem of volumes": {"dims": 3, "trainable": "norm0.bias"},
    "stem in bfloat16": {"dtype": torch.bfloat16, "memory_format": torch.channels_last, "needs_grad_input": False},
}
"""Settings of `_calls`; each name begins with the kind of a subject."""


class Recording(TorchDispatchMode):
    """Records the calls of this package's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "efficient_densenet":
            self.calls.append((operator, tree_map_only(Tensor, _copied, args)))
        return operator(*args, **(kwargs or {}))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)


class _OfOtherAuthors(nn.Module):
    """A block of other authors, run by the shared engine."""

    def __init__(self) -> None:
        super().__init__()
        (self.block,) = randomized(Block(newest_first=True, new_features_only=True))

    def forward(self, x: Tensor) -> Tensor:
        return plan_stage(self.block, None, x).run(x)[0]


def _module(case: str, dims: int = 2, **settings: Any) -> tuple[nn.Module, Tensor]:
    """A module and an input."""
    if case == "block of other authors":
        return _OfOtherAuthors(), torch.randn(2, 4, 7, 6, dtype=torch.double)
    kind = next(kind for kind in KINDS if case.startswith(kind))
    subject = Subject(kind, dims=dims, **settings)
    return subject, subject.input(size=((9, 10, 7) if kind == "stem" else (5, 4, 6))[:dims])


def _calls(
    case: str,
    biases: bool = False,
    frozen: str | None = None,
    trainable: str = "",
    needs_grad_input: bool = True,
    dtype: torch.dtype = torch.double,
    memory_format: torch.memory_format = torch.contiguous_format,
    autocast: bool = False,
    synchronized: bool = False,
    **settings: Any,
) -> list[tuple[Any, tuple]]:
    """The operators that a forward and its backward call, with their arguments."""
    module, x = _module(case, **settings)
    if biases:
        add_conv_biases(module)
    if frozen is not None:
        freeze_norms(module, frozen)
    if trainable == "nothing":
        module.requires_grad_(False)
    elif trainable:
        freeze_parameters(module, lambda name: trainable in name)
    if synchronized:
        synchronize_norms(module, None)
    x = x.to(dtype, memory_format=memory_format).requires_grad_(needs_grad_input)
    with Recording() as recording, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        module.to(dtype)(x).float().square().sum().backward()
    calls = dict(reversed(recording.calls))  # the first call of each
    for operator, arguments in calls.items():
        if operator not in (OPERATORS.stage.default, OPERATORS.stem.default):
            calls[operator] = tree_map_only(Tensor, Tensor.detach, arguments)
        else:
            arguments[0].requires_grad_(needs_grad_input)
    return list(calls.items())


QUICK = "block", "transition", "transition, of which the input alone", "norm", "consumer", "stem", "stem of volumes"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.exhaustive) for case in CASES]
)
def test_opcheck(case):
    """The results on the meta device have the same dtypes and shapes; strides depend on the device."""
    calls = _calls(case, **CASES[case])
    kind = "stem" if case.startswith("stem") else "stage"
    assert {getattr(OPERATORS, name).default for name in (kind, f"{kind}_backward")} <= {each for each, _ in calls}
    for operator, arguments in calls:
        _check(operator, arguments)


def _check(operator: Any, arguments: tuple) -> None:
    copied = tree_map_only(Tensor, lambda tensor: _copied(tensor.detach()), arguments)
    on_meta = tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), arguments)
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}
    if not operator._schema.is_mutable:
        with torch.no_grad():
            results = operator(*copied), operator(*on_meta)
        described = [[(each.dtype, each.shape) for each in result] for result in results]
        assert described[0] == described[1]
        decode = stem_spec.decode if "stem" in operator.name() else spec.decode
        assert decode(arguments[-1]).encoded == arguments[-1]


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allgather_", "Meta"),
    reason="opcheck runs collectives on meta tensors, which this PyTorch cannot",
)
@pytest.mark.usefixtures("process_group_of_one")
@pytest.mark.parametrize("kind", ["transition", "stem"])
def test_opcheck_with_synchronized_norms(kind):
    """The operators return the number of values that the processes have counted."""
    for operator, arguments in _calls(kind, synchronized=True):
        _check(operator, tree_map_only(Tensor, Tensor.detach, arguments))
