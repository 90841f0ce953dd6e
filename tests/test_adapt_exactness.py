"""No conversion changes what a model computes: whatever odd thing a layer does, converted and plain agree.

Compared are outputs, the gradients of the input and of every parameter (None too), buffers, and the states of all
generators of random numbers, over several steps of training, in evaluation, and after later changes of state.
"""

import copy
import functools
import random
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from dense_families import Block, SqueezeAndExcite, tiramisu
from grids import grid
from helpers import assert_close, convert_and_report
from third_party_models import START, LayerHalves, TakesFeatures, build, features_block, image_batch
from torch import Tensor, nn

from efficient_densenet import make_efficient
from efficient_densenet.adapt.transitions import convert_transition
from efficient_densenet.engine import choose

SIDE = 6


def x_of(requires_grad: bool = True) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(3, START, SIDE, SIDE - 1, dtype=torch.double, requires_grad=requires_grad)


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
    own = [each.get_state() for module in model.modules() for each in vars(module).values() if is_generator(each)]
    numbers = {"torch": torch.get_rng_state(), "Python": random.getstate(), "NumPy": str(numpy.random.get_state())}
    return numbers | dict(enumerate(own)) | {name: b.detach().clone() for name, b in model.named_buffers()}


def is_generator(value: object) -> bool:
    return isinstance(value, torch.Generator)


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
    block = features_block(layer, **options)
    for parameter in block.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.3)
    plain = copy.deepcopy(block)
    seed()
    report = convert_and_report(block)
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


ClampsItsOutput = layer_with(odd=lambda self, y: y.clamp(-3, 3))


class ClampsTheBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-100, 100)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("layer", [tiramisu, SqueezeAndExcite])
def test_a_clamp_of_the_block_s_own_forward_stays(layer):
    block = ClampsTheBlock(layer).double()
    plain = copy.deepcopy(block)
    assert not convert_and_report(copy.deepcopy(block), "shared")
    (changed,) = convert_and_report(block).changed
    assert changed.recomputes == "the block whole"
    assert layer is not tiramisu or "found the output of clamp, where" in changed.engine
    with torch.no_grad():
        for each in (*block.parameters(), *plain.parameters()):
            each *= 30  # beyond the range
    assert [each(x_of()).abs().max() for each in (block, plain)] == [100, 100]
    assert_same_steps(block, plain)


class Counts(nn.ReLU):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Observes(nn.ReLU):
    """Keeps a moving average of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return super().forward(x)


def _counts(block: nn.Module) -> None:
    block.denselayer1.relu1 = Counts()


def _observes(block: nn.Module) -> None:
    block.denselayer2.relu1 = Observes()


def _spectral_norm(block: nn.Module) -> None:
    torch.manual_seed(1)
    torch.nn.utils.spectral_norm(block.denselayer1.conv1)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize(
    *grid(layer=[TakesFeatures, ClampsItsOutput], change=[_counts, _observes, _spectral_norm], strength=1)
)
def test_what_was_put_in_after_conversion_runs_plain_once(layer, change):
    block, plain, _ = converted(layer)
    for each in (block, plain):
        change(each.double())
        each.double()
    choose._warned.clear()
    with pytest.warns(UserWarning, match="to 'plain': found that .* since it was verified: call make_efficient again"):
        block(x_of())
    plain(x_of())
    assert_same_steps(block, plain)


def test_norms_keep_their_class_where_nothing_recomputes_them():
    model = build("torchvision")
    norms = [module for module in model.modules() if type(module) is nn.BatchNorm2d]
    make_efficient(model)
    model(image_batch("torchvision")).sum().backward()
    assert all(type(norm) is nn.BatchNorm2d for norm in norms)


class _OddTransition(nn.Sequential):
    def __init__(self) -> None:
        norm, conv = nn.BatchNorm2d(START), nn.Conv2d(START, 4, 1, bias=False)
        super().__init__(norm, nn.ReLU(), conv, nn.Dropout(0.3), nn.AvgPool2d(2))


def _with_a_hook_of_its_gradient(y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(torch.nan_to_num)
    return y


ODD_TRANSITIONS = {
    "asks its own flag": lambda self, x: self[4](F.dropout(self[2](self[1](self[0](x))), self[3].p, self.training)),
    "has a hook of a gradient": lambda self, x: _with_a_hook_of_its_gradient(nn.Sequential.forward(self, x)),
    "branches on the size": lambda self, x: nn.Sequential.forward(self, x) if x.shape[-1] < 16 else self[:4](x),
}


@pytest.mark.parametrize("kind", ODD_TRANSITIONS)
def test_odd_transitions_are_left_alone(kind):
    assert convert_transition(_OddTransition())
    assert not convert_transition(layer_with(_OddTransition, forward=ODD_TRANSITIONS[kind])())


class _Marked(Tensor):
    """A subclass without operations of its own."""


def test_a_transition_that_asks_for_the_class_of_its_input_gets_it():
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return nn.Sequential.forward(self, x) * 2 if isinstance(x, _Marked) else nn.Sequential.forward(self, x)

    plain = layer_with(_OddTransition, forward=forward)()
    transition, x = copy.deepcopy(plain), torch.randn(2, START, 6, 6, requires_grad=True)
    assert convert_transition(transition)
    for each in x, x.as_subclass(_Marked):
        outputs = []
        for module in transition, plain:
            torch.manual_seed(0)
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
    def forward(ctx, weight: Tensor) -> Tensor:
        return torch.cat([weight])

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


def _circular(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(F.pad(x, [side // 2 for side in conv.kernel_size for _ in "  "], mode="circular"), weight, bias)


def _patch_instances(block: nn.Module, monkeypatch) -> None:
    for module in block.modules():
        if isinstance(module, nn.Conv2d):
            monkeypatch.setattr(module, "_conv_forward", functools.partial(_circular, module))


def _patch_class(block: nn.Module, monkeypatch) -> None:
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", _circular)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("patch", [_patch_instances, _patch_class])
def test_a_replaced_convolution_is_called(patch, monkeypatch):
    block, plain, engine = converted(TakesFeatures)
    assert engine == "shared"
    for each in (block, plain):
        patch(each, monkeypatch)
    assert_same_steps(block, plain)
