"""Every set of kernels implements the whole interface, with its parameter names, and refuses sizes that do not fit."""

import importlib
import inspect
import itertools
import re

import pytest
import torch
from helpers import small_model, with_engine
from torch import Tensor

from efficient_densenet.engine.stage import backward as stage_backward
from efficient_densenet.engine.stage import forward as stage_forward
from efficient_densenet.engine.stem import forward as stem_forward
from efficient_densenet.kernels import portable
from efficient_densenet.kernels.comparison import OPERATIONS, STEM_OPERATIONS, Case, StemCase
from efficient_densenet.kernels.interface import Conv1x1, Kernels
from efficient_densenet.kernels.max_pooling import MaxPool

MEMBERS = {name: member for name, member in vars(Kernels).items() if inspect.isfunction(member) and name[0] != "_"}
IMPLEMENTATIONS = {
    "portable": "torch",
    "numba_cpu.host.operations": "numba",
    "triton_gpu.host.operations": "triton",
}


def _parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values() if p.name != "self"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("member", MEMBERS)
def test_each_kernel_has_the_interface_s_parameters(member, implementation):
    pytest.importorskip(IMPLEMENTATIONS[implementation])
    kernels = importlib.import_module(f"efficient_densenet.kernels.{implementation}")
    assert _parameters(getattr(kernels, member)) == _parameters(MEMBERS[member])


WITHOUT_LAUNCH = {"arranged_weights", "images_at_once"}
WRITTEN = (" output", ".output", " previous", "accumulator.grad_accum", "accumulator.sums", ".matrix")
"""The ends of the names of tensors that kernels write."""

MAY_CHANGE = [
    *("batch_statistics values size 0", "affine_forward input.values size 0"),
    *("image_statistics values (size [023]|dimensions)", "pool input.values size [023]"),
    *("(conv3x3|pooled_conv1x1)_forward conv.weight (size 0|dtype)", "norm.(weight|bias) dtype"),
    *("center values dtype", "affine_backward grad_output dtype", "max_pool_.* (grad_output|indices|sums.*) dtype"),
]
"""Changes after which the arguments fit still: any number of rows or output channels, and dtypes that are converted."""


class _Calls:
    """A set of kernels, portable's, that notes the arguments of each call."""

    def __init__(self) -> None:
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            arguments = inspect.signature(getattr(portable, name)).bind(*args, **kwargs).arguments
            self.calls.append((name, arguments))
            return getattr(portable, name)(**arguments)

        return call


def _calls(member: str) -> list[dict]:
    """The arguments of calls of an operation, of which each is needed by some set of kernels."""
    kernels = _Calls()
    for operation in OPERATIONS.values():
        operation(kernels, Case((2, 4, 5), 6, 8))
    for operation in STEM_OPERATIONS.values():
        operation(kernels, StemCase(6, torch.float32, size=(8, 9), pool=MaxPool([3, 3], [1, 1], [1, 1], [1, 1], False)))
    return [arguments for name, arguments in kernels.calls if name == member]


def _leaves(value, name: str):
    """The tensors and shapes in an argument, by their names."""
    if isinstance(value, Tensor | torch.Size):
        yield name, value
    elif hasattr(value, "_fields"):
        for field, each in zip(value._fields, value, strict=True):
            yield from _leaves(each, f"{name}.{field}")


def _with(value, name: str, leaf):
    """A copy of an argument with another leaf."""
    field, _, rest = name.partition(".")
    return leaf if not field else value._replace(**{field: _with(getattr(value, field), rest, leaf)})


def _changes(name: str, leaf):
    """Versions of a tensor or shape that do not fit other arguments, by what was changed."""
    if isinstance(leaf, torch.Size):
        yield "images", torch.Size([leaf[0] + 1, *leaf[1:]])
        yield "dimensions", torch.Size([leaf.numel()])
        return
    for dim, size in enumerate(leaf.shape):
        yield f"size {dim} longer", torch.cat([leaf, leaf.narrow(dim, 0, 1)], dim)
        yield f"size {dim} shorter", leaf.narrow(dim, 0, size - 1)
    yield "dimensions", leaf[..., None]
    yield "dtype", leaf.double()
    if leaf.dim() > 1:
        yield "transposed", leaf.transpose(0, 1)
    if f" {name}".endswith(WRITTEN):
        yield "channels apart", torch.stack([leaf, leaf], -1)[..., 0]
        yield "rows that overlap", leaf[:1].expand(leaf.shape)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("member", sorted(MEMBERS.keys() - WITHOUT_LAUNCH))
def test_arguments_that_do_not_fit_one_another_are_refused(member, implementation):
    """A kernel that ran with them would read or damage memory of others."""
    pytest.importorskip(IMPLEMENTATIONS[implementation])
    kernel = getattr(importlib.import_module(f"efficient_densenet.kernels.{implementation}"), member)
    calls = _calls(member)
    assert calls, f"no operation of `comparison` calls {member}"
    for arguments in calls:
        for name, leaf in (leaf for each, value in arguments.items() for leaf in _leaves(value, each)):
            parameter, _, fields = name.partition(".")
            for change, changed in _changes(name, leaf):
                if not any(re.search(pattern, f"{member} {name} {change}") for pattern in MAY_CHANGE):
                    others = {parameter: _with(arguments[parameter], fields, changed)}
                    with pytest.raises(ValueError, match=r"a kernel was given .*, but needs .*: a layer's tensors"):
                        kernel(**arguments | others)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_next_bottleneck_is_no_wider_than_the_scratch_of_the_layer_before_it(implementation):
    pytest.importorskip(IMPLEMENTATIONS[implementation])
    kernels = importlib.import_module(f"efficient_densenet.kernels.{implementation}")
    arguments = next(each for each in _calls("conv1x1_backward") if "next_bottleneck" in each)
    input, weight, output = arguments["next_bottleneck"]
    wider = Conv1x1(input, weight.repeat(2, 1), output.repeat(1, 2))
    with pytest.raises(ValueError, match=r"next_bottleneck\.weight of shape"):
        kernels.conv1x1_backward(**arguments | {"next_bottleneck": wider})


PAIRS = list(itertools.product(IMPLEMENTATIONS, repeat=2))
COMMON = [("portable", "triton_gpu.host.operations"), ("triton_gpu.host.operations", "portable")]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [pytest.param(*each, marks=[] if each in COMMON else pytest.mark.exhaustive) for each in PAIRS],
)
def test_a_backward_may_run_another_set_than_its_forward(forward, backward, monkeypatch):
    """As where PyTorch's setting for TF32 changes in between, and the Triton kernels have passed for one precision."""
    sets = []
    for each in forward, backward:
        pytest.importorskip(IMPLEMENTATIONS[each])
        sets.append(importlib.import_module(f"efficient_densenet.kernels.{each}"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model, results = small_model("imagenet", block_config=(1, 2, 1)), []
    images = torch.randn(3, 3, 24, 20)
    for network in with_engine(model, "shared").float(), with_engine(model, "plain"):
        for module in stage_forward, stem_forward:
            monkeypatch.setattr(module, "kernels_for", lambda *_, **__: sets[0])
        output = network(images.to(next(network.parameters()).dtype))
        for module in stage_backward, stem_forward:  # the stem's backward computes its convolution again
            monkeypatch.setattr(module, "kernels_for", lambda *_, **__: sets[1])
        (output * torch.arange(5)).sin().sum().backward()
        results.append([output.detach(), *(parameter.grad for parameter in network.parameters())])
    largest = max(float(each.abs().max()) for each in results[1])
    for shared, plain in zip(*results, strict=True):  # a gradient may be zero but for rounding
        assert (shared - plain).abs().max() <= 1e-3 * (plain.abs().max() + 0.01 * largest)
