"""Layers that do something odd with what they compute: converted or not, none differs from plain, wherever it runs."""

import copy
import itertools
import random
import time
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from test_adapt_exactness import Layer, assert_same_steps, converted, layer_with, seed, x_of
from torch import Tensor, nn

_generator, _random, _numpy = torch.Generator(), random.Random(1), numpy.random.default_rng(1)
_system_random, _numbers = random.SystemRandom(), itertools.count()


class _Ninth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad / 9


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.clamp(-50, 50)


class _Marked(Tensor):
    """A subclass without operations of its own, as libraries have them for metadata."""


def _double_if_wide(y: Tensor) -> Tensor:
    return y * 2 if y.size(3) > 8 else y


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # new releases of PyTorch deprecate TorchScript, which layers still call
    _scripted = torch.jit.script(_double_if_wide)


def _hooked(layer: nn.Module, y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-50, 50))
    return y


def when(condition: Callable[[nn.Module, Tensor], bool]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda layer, y: y * 2 if condition(layer, y) else y


def draws(number: Callable[[], float]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda layer, y: y * (0.5 + number()) if layer.training else y


# Each: the names of the engines that may run such layers, "" for none; and what a layer does with its output.
WHOLE = {
    "clamps": lambda s, y: y.clamp(-3, 3),
    "takes a minimum": lambda s, y: torch.minimum(y, torch.full_like(y, 1e3)),
    "clips": lambda s, y: F.hardtanh(y, -50, 50),
    "replaces what is no number": lambda s, y: torch.nan_to_num(y),
    "has a threshold": lambda s, y: F.threshold(y, -1e3, 0.0),
    "chooses": lambda s, y: torch.where(y > 1e5, y * 0, y),
    "scales in place": lambda s, y: y.mul_(0.5),
    "scales back": lambda s, y: y * 3 / 3,
    "detaches a part": lambda s, y: y + (y * 0.5).detach(),
    "detaches a weight": lambda s, y: y * s.conv2.weight.detach().mean(),
    "clamps a weight": lambda s, y: y * s.conv2.weight.clamp(-1, 1).mean(),
    "scales a gradient": lambda s, y: _Ninth.apply(y),
    "clamps a gradient in a hook": _hooked,
    "is not linear": lambda s, y: y.tanh() * 5,
    "asks for training": when(lambda s, y: s.training),
    "asks for the flag of a norm": lambda s, y: y.tanh() if s.training and not s.norm1.training else y,
    "asks for a gradient": when(lambda s, y: y.requires_grad),
    "asks for a weight's gradient": when(lambda s, y: s.conv1.weight.requires_grad),
    "asks for a graph": when(lambda s, y: y.grad_fn is not None),
    "asks for a leaf": when(lambda s, y: not y.is_leaf),
    "asks for a size": when(lambda s, y: y.shape[-1] > 8),
    "asks for a size in TorchScript": lambda s, y: _scripted(y),
    "asks for images": when(lambda s, y: y.shape[0] > 8),
    "asks for a dtype": when(lambda s, y: y.dtype == torch.float32),
    "asks for the memory format": when(lambda s, y: y.is_contiguous(memory_format=torch.channels_last)),
    "asks for autocast": when(lambda s, y: torch.is_autocast_enabled("cpu")),
    "draws from PyTorch": when(lambda s, y: s.training and bool(torch.rand(()) < 0.5)),
    "asks for values": when(lambda s, y: bool(y.mean() < 1e4)),
    "asks for a list of values": when(lambda s, y: max(y.flatten().tolist()) < 1e4),
}
SHARED = {
    "asks for the flags of two modules": when(lambda s, y: s.relu1.training != s.conv1.training),
    "asks for the class": when(lambda s, y: isinstance(y, _Marked)),
    "prints under a flag": lambda s, y: (print(y.shape) if s.efficient else None, y)[1],
}
NOWHERE = {
    "asks for the grad mode": when(lambda s, y: torch.is_grad_enabled()),
    "asks for inference mode": when(lambda s, y: torch.is_inference_mode_enabled()),
    "asks for the default dtype": when(lambda s, y: torch.get_default_dtype() == torch.double),
    "asks for the batches that a norm has seen": when(lambda s, y: int(s.norm1.num_batches_tracked) > 2),
    "draws from Python": when(lambda s, y: s.training and random.random() < 0.5),
    "draws from NumPy": when(lambda s, y: s.training and numpy.random.rand() < 0.5),
    "draws from a generator": draws(lambda: float(torch.rand((), generator=_generator))),
    "draws from a random.Random": draws(lambda: _random.random()),
    "draws from NumPy's new generator": draws(lambda: _numpy.random()),
    "draws from the system": draws(lambda: _system_random.random()),
    "counts": lambda s, y: y if next(_numbers) < 1000 else y * 2,
    "asks for the time": when(lambda s, y: time.monotonic() < 0),
    "prints": lambda s, y: (print("a layer"), y)[1],
    "imports a module": lambda s, y: __import__("math") and y,
    "computes gradients": lambda s, y: (y.sum().backward(retain_graph=True) if y.requires_grad else None, y)[1],
    "changes a weight": lambda s, y: y + 0 * s.conv2.weight.data.mul_(0.9).sum(),
}


def _call(block: nn.Module, x: Tensor, dtype: torch.dtype = torch.double, autocast: bool = False) -> Tensor:
    seed()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return copy.deepcopy(block).to(dtype)(x.to(dtype))


def _with_double_as_default(block: nn.Module, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.double)
    try:
        return _call(block, x)
    finally:
        torch.set_default_dtype(torch.float32)


CALLS: list[Callable[[nn.Module, Tensor], Tensor]] = [
    lambda block, x: _call(block, F.pad(x, (3,) * 4)),
    lambda block, x: _call(block, torch.cat([x] * 4)),
    lambda block, x: _call(block, x, torch.float32),
    lambda block, x: _call(block, x.as_subclass(_Marked)).as_subclass(Tensor),
    lambda block, x: _call(block, x.to(memory_format=torch.channels_last)),
    lambda block, x: _call(block, x, torch.float32, autocast=True),
    _with_double_as_default,
]
"""Calls that a trace's input may not stand for."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*WHOLE, *SHARED])
def test_an_odd_layer_computes_what_it_did(kind):
    block, plain, engine = converted(layer_with(odd=(WHOLE | SHARED)[kind]))
    assert engine == ("shared" if kind in SHARED else "checkpoint")
    assert_same_steps(block, plain, scale=1e4)
    for call in CALLS:
        actual, expected = call(block, x_of(False)), call(plain, x_of(False))
        tolerance = 1e-9 if expected.dtype == torch.double else 2e-2
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for module in (*block.modules(), *plain.modules()):
        module.training = not isinstance(module, nn.BatchNorm2d)
    torch.testing.assert_close(_call(block, x_of()), _call(plain, x_of()))
    with torch.no_grad():
        for each in (block, plain):
            each.denselayer1.conv2.weight *= 1e4  # beyond every range
    assert_same_steps(block, plain, 1)


@pytest.mark.parametrize("kind", NOWHERE)
def test_what_cannot_be_repeated_is_left_alone_and_no_generator_moves(kind):
    def states() -> list:
        return [_generator.get_state().tolist(), _random.getstate(), str(_numpy.bit_generator.state), repr(_numbers)]

    before = states()
    block, plain, engine = converted(layer_with(odd=NOWHERE[kind]))
    assert engine == ""
    assert states() == before
    assert type(block) is type(plain)


def test_a_function_mode_around_the_conversion_is_not_the_blocks():
    class Mode(torch.overrides.TorchFunctionMode):  # as trainers build a model in one
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        block, plain, _ = converted(layer_with())
    assert type(block) is not type(plain)
    assert_same_steps(block, plain)


def test_channels_may_be_counted_and_selected():
    assert converted(layer_with(odd=lambda self, y: torch.cat([y, y], 1)[:, : y.size(1)]))[2] == "shared"


@pytest.mark.skipif(torch.__version__ < "2.14", reason="PyTorch 2.11 shows no mode what such a Function does")
def test_what_a_function_does_to_large_gradients_alone_stays():
    block, plain, engine = converted(layer_with(Layer, odd=lambda self, y: _Clamped.apply(y)))
    assert engine != "shared"
    assert_same_steps(block, plain, scale=1e4)
