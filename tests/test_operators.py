"""The shared engine's PyTorch operators: `opcheck` of each over many specifications, which survive encoding."""

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers import (
    add_conv_biases,
    assert_all_close,
    assert_same_buffers,
    freeze_norms,
    freeze_parameters,
    small_model,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from efficient_densenet.engine.parts import BlockParts, consumer_parts, parts_of
from efficient_densenet.engine.stage import spec
from efficient_densenet.engine.stage.forward import StageInputs
from efficient_densenet.engine.stage.operator import STAGE
from efficient_densenet.engine.stage.run import StageFormats, StagePlan
from efficient_densenet.engine.stem import Stem, StemPlan
from efficient_densenet.engine.stem import spec as stem_spec
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # raised by opcheck

SIDES = (5, 4, 6)
CHANNELS_LAST = {"memory_format": torch.channels_last}
STAGES: dict[str, dict[str, Any]] = {
    "block": {},
    "block without bottlenecks": {"bn_size": 0, "biases": True},
    "new features only, newest first": {"order": {"new_features_only": True, "newest_first": True}},
    "transition": {"consumer": "transition1", "biases": True},
    "transition, channels_last": {"consumer": "transition1", **CHANNELS_LAST},
    "transition of signals": {"consumer": "transition1", "dims": 1},
    "transition of volumes": {"consumer": "transition1", "dims": 3},
    "transition that hands on its output": {"consumer": "transition1", "keeps_channels_last": True},
    "transition of volumes that hands on its output": {
        "consumer": "transition1",
        "dims": 3,
        "keeps_channels_last": True,
    },
    "transition and features, newest first": {
        "consumer": "transition1",
        "return_features": True,
        "order": {"newest_first": True},
    },
    "norm": {"consumer": "norm5", "block_config": (2,)},
    "norm and features": {"consumer": "norm5", "block_config": (2,), "return_features": True, **CHANNELS_LAST},
    "dropout and kept bottlenecks": {"consumer": "transition1", "drop_rate": 0.4, "keep_bottleneck": True},
    "frozen norms": {"consumer": "transition1", "frozen": "norm", "biases": True},
    "frozen norms of bottlenecks": {"frozen": "norm2", "biases": True, "keep_bottleneck": True},
    "frozen norms of features": {"consumer": "transition1", "frozen": "norm1", **CHANNELS_LAST},
    "some parameters": {"consumer": "transition1", "trainable": "norm"},
    "the input alone": {"consumer": "transition1", "trainable": "classifier"},
    "parameters alone": {"consumer": "transition1", "input": False},
    "bfloat16": {"consumer": "transition1", "dtype": torch.bfloat16, **CHANNELS_LAST},
    "frozen norms and ELU": {"consumer": "transition1", "frozen": "norm", "activation": "elu"},
    "float32 under autocast": {"consumer": "transition1", "dtype": torch.float32, "autocast": True},
}
"""The settings of `_stage`."""
LIKE_OTHERS = {"transition, channels_last", "transition of signals", "transition of volumes", "norm"}
LIKE_OTHERS |= {"signals with a bias", "the norm's bias alone"}


def _cases(settings: dict[str, dict[str, Any]]) -> list:
    """The first tier has every setting, but not alone."""
    return [pytest.param(case, marks=pytest.mark.exhaustive if case in LIKE_OTHERS else ()) for case in settings]


class Recording(TorchDispatchMode):
    """Records the calls of the operators of a stage and of a stem, but not the update of running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "efficient_densenet" and not operator._schema.is_mutable:
            self.calls.append((operator, args))
        return operator(*args, **(kwargs or {}))


def _stage(
    consumer: str | None = None,
    return_features: bool = False,
    order: dict[str, bool] | None = None,
    frozen: str | None = None,
    biases: bool = False,
    trainable: str = "",
    input: bool = True,
    dims: int = 2,
    dtype: torch.dtype = torch.double,
    memory_format: torch.memory_format = torch.contiguous_format,
    autocast: bool = False,
    synchronized: bool = False,
    keeps_channels_last: bool = False,
    **overrides: Any,
) -> tuple[StagePlan, Tensor]:
    """The plan of a stage of two layers, and its input."""
    settings = {"growth_rate": 2, "num_init_features": 3, "block_config": (2, 1), "bn_size": 2} | overrides
    model = small_model("bc", dims=dims, **settings)
    if biases:
        add_conv_biases(model)
    if frozen is not None:
        freeze_norms(model, frozen)
    if frozen == "norm1":  # the norms of the features must agree
        freeze_norms(model, "transition1")
    if trainable:
        freeze_parameters(model, lambda name: trainable in name)
    if synchronized:
        synchronize_norms(model, None)
    features = model.to(dtype).features
    block = replace(parts_of(features.denseblock1), **(order or {}))
    after = None if consumer is None else consumer_parts(features.get_submodule(consumer))
    x = torch.randn(2, 3, *SIDES[:dims], dtype=dtype).to(memory_format=memory_format).requires_grad_(input)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        formats = StageFormats(memory_format, keeps_channels_last)
        return StagePlan(block, after, x, return_features, formats), x


def _calls(run: Any) -> list[tuple[Any, tuple]]:
    """The operators that a forward and its backward call, with their arguments."""
    with Recording() as recording:
        sum(output.float().square().sum() for output in run()).backward()
    return recording.calls


def _check(operator: Any, arguments: tuple, needs_grad: int) -> None:
    """`opcheck`, on copies of the arguments of which the first `needs_grad` may require gradients, and on the meta
    device."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone(memory_format=torch.preserve_format)

    def differentiable(tensor: Tensor) -> Tensor:
        return copied(tensor).requires_grad_(tensor.requires_grad)

    copies = (
        *tree_map_only(Tensor, differentiable, arguments[:needs_grad]),
        *tree_map_only(Tensor, copied, arguments[needs_grad:]),
    )
    results = torch.library.opcheck(operator, copies)
    assert set(results.values()) == {"SUCCESS"}
    with torch.no_grad():
        results = operator(*tree_map_only(Tensor, copied, arguments))
        on_meta = operator(*tree_map_only(Tensor, lambda tensor: tensor.to("meta"), arguments))
    # Strides are not compared: which a convolution's output has depends on the device.
    assert [(each.dtype, each.shape) for each in on_meta] == [(each.dtype, each.shape) for each in results]


@pytest.mark.parametrize("case", _cases(STAGES))
def test_stage(case):
    """And its specification survives encoding."""
    stage, x = _stage(**STAGES[case])
    decoded = spec.decode(stage.spec.encoded)
    assert decoded == stage.spec
    assert decoded.encoded == stage.spec.encoded  # which both keep from now on
    assert vars(decoded) == vars(stage.spec)
    forward, backward = _calls(lambda: stage.apply(x, *stage.tensors))
    assert (forward[0], backward[0]) == (
        torch.ops.efficient_densenet.stage.default,
        torch.ops.efficient_densenet.stage_backward.default,
    )
    called, (_, *rest) = forward
    _check(called, (x, *rest), needs_grad=2)
    _check(*backward, needs_grad=0)


@pytest.mark.parametrize("frozen", [False, True])
def test_consumer_of_stored_features(frozen):
    stage, x = _stage(frozen="norm" if frozen else None)
    block_output, *_ = stage.apply(x, *stage.tensors)
    transition = small_model("bc", growth_rate=2, num_init_features=3, block_config=(2, 1)).features.transition1
    add_conv_biases(transition)
    plan = StagePlan(BlockParts(()), consumer_parts(transition.train(not frozen)), block_output)
    forward, backward, _ = _calls(lambda: plan.run(block_output))
    called, (_, *rest) = forward
    assert len(rest[3]) == 2 - frozen
    _check(called, (block_output.detach().requires_grad_(), *rest), needs_grad=2)
    _check(*backward, needs_grad=0)


STEMS: dict[str, dict[str, Any]] = {
    "images": {},
    "images, channels_last": CHANNELS_LAST,
    "signals with a bias": {"dims": 1, "bias": True},
    "volumes": {"dims": 3},
    "frozen norm": {"frozen": True, "bias": True},
    "parameters alone": {"input": False},
    "the input alone": {"trainable": "classifier"},
    "the norm's bias alone": {"trainable": "norm0.bias", "input": False},
    "bfloat16": {"dtype": torch.bfloat16},
    "float32 under autocast": {"dtype": torch.float32, "autocast": True},
    "pooled, rounded up": {"pool": nn.MaxPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True)},
}
"""The settings of `_stem`."""


def _stem(
    dims: int = 2,
    bias: bool = False,
    frozen: bool = False,
    trainable: str = "",
    input: bool = True,
    dtype: torch.dtype = torch.double,
    memory_format: torch.memory_format = torch.contiguous_format,
    pool: nn.Module | None = None,
    autocast: bool = False,
    synchronized: bool = False,
) -> tuple[StemPlan, Tensor]:
    model = small_model("imagenet", dims=dims, block_config=(1,))
    if bias:
        add_conv_biases(model, "conv0")
    if frozen:
        freeze_norms(model, "norm0")
    if trainable:
        freeze_parameters(model, lambda name: trainable in name)
    if synchronized:
        synchronize_norms(model, None)
    stem = Stem(*model.to(dtype).features[:4])
    if pool is not None:
        stem = stem._replace(pool=pool)
    x = torch.randn(2, 3, *(9, 10, 7)[:dims], dtype=dtype).to(memory_format=memory_format).requires_grad_(input)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return StemPlan(stem, x), x


@pytest.mark.parametrize("case", _cases(STEMS))
def test_stem(case):
    """And its specification survives encoding."""
    plan, x = _stem(**STEMS[case])
    settings = plan.spec
    decoded = stem_spec.decode(settings.encoded)
    assert decoded.encoded == settings.encoded
    assert decoded._replace(conv=None, pool=None) == settings._replace(conv=None, pool=None)
    assert [list(map(_listed, part)) for part in decoded[-2:]] == [list(map(_listed, part)) for part in settings[-2:]]
    forward, backward = _calls(lambda: [plan.run(x)])
    called, (_, *rest) = forward
    assert (called, backward[0]) == (
        torch.ops.efficient_densenet.stem.default,
        torch.ops.efficient_densenet.stem_backward.default,
    )
    _check(called, (x, *rest), needs_grad=2)
    _check(*backward, needs_grad=0)


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allgather_", "Meta"),
    reason="opcheck runs collectives on meta tensors, which this PyTorch cannot",
)
@pytest.mark.usefixtures("process_group_of_one")
def test_synchronized_norms():
    """The operators return the number of values that the processes have counted."""
    stage, x = _stage("transition1", synchronized=True)
    assert stage.spec.has_count
    for called, arguments in _calls(lambda: stage.apply(x, *stage.tensors)):
        _check(called, arguments, needs_grad=0)
    plan, x = _stem(synchronized=True)
    assert plan.spec.has_count
    for called, arguments in _calls(lambda: [plan.run(x)]):
        _check(called, arguments, needs_grad=0)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_every_setting_of_a_stage_is_in_its_encoding():
    """Two specifications that differ in a single setting are never one for a compiler."""
    settings = _stage("transition1", drop_rate=0.1)[0].spec
    others = {
        "dtype": "float32",
        "channels_last": True,
        "keeps_channels_last": True,
        "in_channels": 5,
        "growth_rate": 7,
        "newest_first": True,
        "new_features_only": True,
        "return_features": True,
        "frozen": True,
        "eps": 0.5,
        "sync_group": "group",
        "layers": settings.layers[:1],
        "consumer": None,
    }
    assert others.keys() == {field.name for field in fields(settings)}
    changed = [replace(settings, **{name: value}) for name, value in others.items()]
    for name, value in {"width": 9, "dilation": 3, "drop_rate": 0.7, "norm2_eps": 0.3}.items():
        changed.append(replace(settings, layers=(settings.layers[0]._replace(**{name: value}), *settings.layers[1:])))
    assert len({each.encoded for each in (settings, *changed)}) == len(changed) + 1
    assert all(spec.decode(each.encoded) == each for each in changed)


@pytest.mark.parametrize("create_graph", [False, True])
def test_eager_mode_encodes_no_specification(create_graph, monkeypatch):
    """It runs the engine without the operators, which take a specification as a string."""
    model, images = small_model("imagenet", efficient="shared"), torch.randn(2, 3, 40, 40, dtype=torch.double)
    for spec_class in (spec.StageSpec, stem_spec.StemSpec):
        monkeypatch.setattr(spec_class, "encoded", property(lambda self: pytest.fail("encoded")))
    grads = torch.autograd.grad(model(images).sum(), list(model.parameters()), create_graph=create_graph)
    assert all(grad.isfinite().all() for grad in grads)


def test_running_statistics_are_updated_outside_the_operator():
    model = small_model("bc", block_config=(2, 1))
    block, transition = model.features.denseblock1, model.features.transition1
    x = torch.randn(2, 4, 5, 6, dtype=torch.double)
    stage = StagePlan(parts_of(block), consumer_parts(transition), x)
    before = copy.deepcopy(model)
    STAGE.forward(stage.spec, StageInputs(x, stage.tensors))
    assert_same_buffers(model, before, 0)
    for run in range(1, 3):
        stage.apply(x, *stage.tensors)
        assert block.denselayer2.norm2.num_batches_tracked == run


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_update_of_running_statistics(momentum):
    """Of a norm that reads columns 1 to 4, which lack a bias, and one that reads columns 0 to 5."""
    running, statistics = [torch.rand(size) for size in (3, 3, 5, 5)], torch.rand(3, 6)
    biases, (mean, variance, _) = [torch.rand(3), None], statistics
    counts, update = [torch.tensor(2), torch.tensor(0)], torch.ops.efficient_densenet.update_running_statistics.default
    arguments = running, counts, statistics, [1, 4, 0, 5], biases, momentum
    torch.library.opcheck(update, arguments)
    batch = mean[1:4] + biases[0], variance[1:4], mean[:5], variance[:5]
    expected = [
        value + (after - value) * (momentum or weight)
        for value, after, weight in zip(running, batch, (1 / 3, 1 / 3, 1, 1), strict=True)
    ]
    update(*arguments)
    assert counts == [3, 1]
    assert_all_close(running, expected, 1e-6)
