"""No conversion changes what a model computes: whatever odd thing a layer does, converted and plain agree.

Compared are outputs, the gradients of the input and of every parameter (None too), buffers, and the states of all
generators of random numbers, over several steps of training, in evaluation, and after later changes of state.
"""

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
from dense_families import Block, SqueezeAndExcite, tiramisu
from helpers import assert_close
from third_party_models import START, LayerHalves, TakesFeatures, convert_pair, features_block, randomized
from torch import Tensor, nn

from efficient_densenet.adapt.transitions import convert_transition


def x_of(requires_grad: bool = True) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(3, START, 6, 5, dtype=torch.double, requires_grad=requires_grad)


def step(model: nn.Module, requires_grad: bool = True, scale: float = 1.0) -> dict:
    """All that a step of training leaves behind, and what evaluation and an ungraded forward return then."""
    seed()
    model.train().zero_grad()
    x = x_of(requires_grad)
    output = model(x)
    (output * torch.linspace(-scale, scale, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    results = {"output": output.detach(), "grad of x": x.grad, **states(model)}
    results |= {f"grad of {name}": p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad
        results["without gradients"] = model(x_of(False))
        results["evaluation"] = model.eval()(x_of(False))
    results |= {f"{name} afterwards": value for name, value in states(model).items()}
    return results


def seed() -> None:
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)


def states(model: nn.Module) -> dict:
    numbers = {"torch": torch.get_rng_state(), "Python": random.getstate(), "NumPy": str(numpy.random.get_state())}
    return numbers | {name: b.detach().clone() for name, b in model.named_buffers()}


def assert_same_steps(ours: nn.Module, plain: nn.Module, num_steps: int = 2, scale: float = 1.0) -> None:
    """Both do the same, whether the input requires a gradient or not; `scale` is the largest gradient of the output."""
    for requires_grad in [True] * num_steps + [False]:
        results = []
        for each in (ours, plain):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(step(each, requires_grad, scale))
        actual, expected = results
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, Tensor) and isinstance(actual[name], Tensor):
                assert_close(actual[name], value)
            else:
                assert actual[name] == value, name


def converted(layer: type[nn.Module], **options) -> tuple[nn.Module, nn.Module, str]:
    """A block of such layers, converted; its plain copy; and the name of the engine, "" where nothing was converted."""
    torch.manual_seed(3)
    block = randomized(features_block(layer, **options))
    seed()
    block, plain, report = convert_pair(block)
    return block, plain, report.changed[0].engine.partition(" ")[0] if report else ""


class Layer(LayerHalves):
    """A layer whose subclasses do something odd in `odd`."""

    def forward(self, *features: Tensor) -> Tensor:
        return self.odd(self.second_half(self.first_half(*features)))

    def odd(self, y: Tensor) -> Tensor:
        return y


def layer_with(base: type[nn.Module] = Layer, **methods: Callable) -> type[nn.Module]:
    """A subclass of `base` with these methods."""
    return type(f"Odd{base.__name__}", (base,), methods)


class ClampsTheBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-100, 100)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("layer", [tiramisu, SqueezeAndExcite])
def test_a_clamp_of_the_block_s_own_forward_stays(layer):
    block, plain, report = convert_pair(ClampsTheBlock(layer).double())
    (changed,) = report.changed
    assert changed.recomputes == "the block whole"
    assert layer is not tiramisu or "found the output of clamp, where" in changed.engine
    with torch.no_grad():
        for each in (*block.parameters(), *plain.parameters()):
            each *= 30  # beyond the range
    assert [each(x_of()).abs().max() for each in (block, plain)] == [100, 100]
    assert_same_steps(block, plain)


def test_norms_keep_their_class_where_nothing_recomputes_them():
    block, plain, _ = converted(TakesFeatures)
    block(x_of()).sum().backward()
    kinds = [[type(each) for each in model.modules() if isinstance(each, nn.BatchNorm2d)] for model in (block, plain)]
    assert kinds[0] == kinds[1]


class _OddTransition(nn.Sequential):
    def __init__(self) -> None:
        norm, conv = nn.BatchNorm2d(START), nn.Conv2d(START, 4, 1, bias=False)
        super().__init__(norm, nn.ReLU(), conv, nn.Dropout(0.3), nn.AvgPool2d(2))


ODD_TRANSITIONS = {
    "asks its own flag": lambda self, x: self[4](F.dropout(self[2](self[1](self[0](x))), self[3].p, self.training)),
    "branches on the size": lambda self, x: nn.Sequential.forward(self, x) if x.shape[-1] < 16 else self[:4](x),
}


@pytest.mark.parametrize("kind", ODD_TRANSITIONS)
def test_odd_transitions_are_left_alone(kind):
    assert not convert_transition(layer_with(_OddTransition, forward=ODD_TRANSITIONS[kind])())


class _Marked(Tensor):
    """A subclass without operations of its own, as libraries have them for metadata."""


def test_a_transition_that_asks_for_the_class_of_its_input_gets_it():
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return nn.Sequential.forward(self, x) * 2 if isinstance(x, _Marked) else nn.Sequential.forward(self, x)

    plain = layer_with(_OddTransition, forward=forward)().double()
    transition, x = copy.deepcopy(plain), x_of()
    assert convert_transition(transition)
    for each in x, x.as_subclass(_Marked):
        outputs = []
        for module in transition, plain:
            seed()
            outputs.append(module(each).as_subclass(Tensor))
        torch.testing.assert_close(*outputs)


class UpdatesWithGradientsOnly(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        updates = self.training and torch.is_grad_enabled()
        if updates:
            self.num_batches_tracked.add_(1)
        mean, var, momentum = self.running_mean, self.running_var, self.momentum if updates else 0.0
        return F.batch_norm(x, mean, var, self.weight, self.bias, self.training, momentum, self.eps)


class _Ninth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad / 9


class ScalesItsWeightsGradient(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        mean, var, weight = self.running_mean, self.running_var, _Ninth.apply(self.weight)
        return F.batch_norm(x, mean, var, weight, self.bias, self.training, self.momentum, self.eps)


class ReadsItsStatistics(nn.BatchNorm2d):
    """Begins to when its counter says so, as batch renormalization does."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + 0.2 * min(int(self.num_batches_tracked), 3)
        return super().forward(x) * factor + self.running_mean.mean() * (factor - 1)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize(
    ("norm", "expected"),
    [(UpdatesWithGradientsOnly, ""), (ScalesItsWeightsGradient, "checkpoint"), (ReadsItsStatistics, "checkpoint")],
)
def test_norms_whose_forward_is_not_torch_s_are_called(norm, expected):
    block, plain, engine = converted(TakesFeatures, norm=norm)
    assert engine == expected
    with torch.no_grad():
        block(x_of()), plain(x_of())
    assert_same_steps(block, plain)


_generator, _random, _numpy = torch.Generator(), random.Random(1), numpy.random.default_rng(1)
_system_random, _numbers = random.SystemRandom(), itertools.count()


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.clamp(-50, 50)


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
    "asks for large values": when(lambda s, y: bool(y.mean() > 1e4)),
    "asks for a list of values": when(lambda s, y: max(y.flatten().tolist()) < 1e4),
}
if torch.__version__ >= "2.14":  # PyTorch 2.11 shows no mode what such a Function does
    WHOLE["clamps a gradient in a Function"] = lambda s, y: _Clamped.apply(y)
SHARED = {
    "counts and selects channels": lambda s, y: torch.cat([y, y], 1)[:, : y.size(1)],
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
