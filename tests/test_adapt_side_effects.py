"""Blocks whose forward does more than compute its output are left alone: an engine would not, or would do it twice."""

import collections
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from dense_families import Block, tiramisu
from helpers import convert_and_report
from third_party_models import GROWTH, START, FunctionalTransition, LayerHalves, assert_same_training
from torch import Tensor, nn

X = torch.randn(3, START, 6, 5, dtype=torch.double)
_skips: list[Tensor] = []


class KeepsItsOutput(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.skip = super().forward(x)
        return self.skip


class AppendsToItsList(Block):
    def __init__(self, layer) -> None:
        super().__init__(layer)
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs.append(x.mean())
        return super().forward(x)


def _add(count: Tensor) -> None:
    count.add_(1)


class CountsInATensorByAFunction(Block):
    def __init__(self, layer) -> None:
        super().__init__(layer)
        self.count = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        _add(self.count)
        return super().forward(x)


class AppendsToAGlobalList(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        _skips.append(x)
        return x


class AppendsToAListOfItsClass(Block):
    """Few of its forwards do, and none while it is converted."""

    large: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 1e3:
            self.large.append(x)
        return super().forward(x)


class HandsItsOutputOn(Block):
    def __init__(self, layer) -> None:
        super().__init__(layer)
        self.skips: collections.deque = collections.deque()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.skips.append(x)
        return x

    def __deepcopy__(self, memo: dict) -> nn.Module:  # what a deque holds cannot be copied
        self.skips.clear()
        copied = type(self)(tiramisu).double()
        copied.load_state_dict(self.state_dict())
        return copied


class HooksItsInput(Block):
    """Halves the gradient of its input, wherever the input comes from."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad / 2)
        return super().forward(x)


class _CountingLayer(LayerHalves):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second_half(self.first_half(x)) * (1.0 if self.calls <= 2 else 0.5)


class _LayerWithAScript(LayerHalves):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.script = torch.jit.trace(nn.Sigmoid(), torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.script(self.second_half(self.first_half(x)))


class RunningNorm(nn.Module):
    """A norm of its author's, whose running statistics a recomputation would update a second time."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(x.mean((0, 2, 3)), 0.1)
        return (x - self.running_mean[:, None, None]) * self.weight[:, None, None] + self.bias[:, None, None]


def _own_norm(channels: int) -> nn.Module:
    return nn.Sequential(RunningNorm(channels), nn.ReLU(), nn.Conv2d(channels, GROWTH, 3, padding=1))


BLOCKS = {
    "keeps its output": (
        lambda: KeepsItsOutput(tiramisu),
        "after its forward skip of a KeepsItsOutput has changed",
    ),
    "appends to its list": (
        lambda: AppendsToItsList(tiramisu),
        "after its forward outputs of a AppendsToItsList has changed",
    ),
    "counts in a tensor by a function": (
        lambda: CountsInATensorByAFunction(tiramisu),
        "writes to a tensor that is not its own",
    ),
    "holds a script": (lambda: Block(_LayerWithAScript), "holds a ScriptModule, whose code is not Python's"),
    "appends to a global list": (
        lambda: AppendsToAGlobalList(tiramisu),
        "after its forward _skips in AppendsToAGlobalList.forward has changed",
    ),
    "appends to a list of its class": (
        lambda: AppendsToAListOfItsClass(tiramisu),
        "decides by values of tensors, and may write to large of a AppendsToAListOfItsClass",
    ),
    "hands its output on": (
        lambda: HandsItsOutputOn(tiramisu),
        "after its forward skips of a HandsItsOutputOn has changed",
    ),
    "hooks its input": (lambda: HooksItsInput(tiramisu), "registers a hook on its input, which would see another"),
    "counts": (lambda: Block(_CountingLayer), "after its forward calls of a _CountingLayer has changed"),
    "norm of its own": (lambda: Block(_own_norm), "after its forward layers.0.0.running_mean has changed"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_whose_forward_has_side_effects_is_left_alone_and_reported(kind):
    build, reason = BLOCKS[kind]
    block = build().double()
    plain = copy.deepcopy(block)
    report = convert_and_report(block)
    _skips.clear()
    assert not report
    assert reason in report.unchanged[""]
    assert "checkpoint_wrapper" not in str(report)
    assert type(block) is type(plain)
    assert vars(block).keys() - {"_conversion_report"} == vars(plain).keys()
    assert_same_training(block, plain, X)
    _skips.clear()


class _Slots:
    __slots__ = ("size",)


_object, _slots = SimpleNamespace(), _Slots()
_size, _slots.size = None, None


def _blocks_that_keep_a_size() -> tuple[nn.Module, nn.Module, Callable[[], int | None]]:
    """A block that keeps a size in every place when it first needs it, one of a subclass, and what the closure has."""
    in_closure: int | None = None

    class KeepsASize(Block):
        size: ClassVar[int | None] = None

        def forward(self, x: Tensor) -> Tensor:
            global _size
            nonlocal in_closure
            if in_closure is None:
                _size = in_closure = _slots.size = _object.size = KeepsASize.size = _add.size = x.shape[2]
            return super().forward(x * in_closure)

    return KeepsASize(tiramisu), nn.Sequential(KeepsASize(tiramisu)), lambda: in_closure


@pytest.mark.parametrize("kind", [0, 1])
def test_a_size_that_a_forward_keeps_is_none_of_a_trace(kind):
    *blocks, in_closure = _blocks_that_keep_a_size()
    assert not convert_and_report(blocks[kind])
    assert [in_closure(), type(blocks[0]).size, _size, _slots.size] == [None] * 4
    assert "size" not in vars(_object) | vars(_add)


class KeepsWhatItPools(FunctionalTransition):
    def forward(self, x: Tensor) -> Tensor:
        self.before_pooling = self.conv(F.relu(self.bn(x)))
        return F.avg_pool2d(self.before_pooling, 2)


def test_a_transition_whose_forward_has_side_effects_is_called():
    model = nn.Sequential(Block(tiramisu), KeepsWhatItPools(START + 3 * GROWTH, 8)).double()
    plain = copy.deepcopy(model)
    report = convert_and_report(model)
    assert len(report) == 1
    assert not report.transitions
    assert_same_training(model, plain, X)
    losses = []
    for each in (model, plain):
        torch.manual_seed(0)
        losses.append(each(X).sum() + each[1].before_pooling.square().sum())
    torch.testing.assert_close(*losses)


class _WithAnEngine(Block):
    def engine(self) -> str:
        return "its own"


def test_a_block_with_a_name_that_converted_blocks_need_is_left_alone():
    block = _WithAnEngine(tiramisu)
    report = convert_and_report(block)
    assert report.unchanged == {"": "found engine in a _WithAnEngine, a name that converted blocks need themselves"}
    assert block.engine() == "its own"


def test_a_module_that_concatenates_nothing_is_no_block():
    halving = nn.Sequential(nn.BatchNorm2d(18), nn.Conv2d(18, 9, 1, bias=False), nn.AvgPool2d(2))
    activated_first = nn.Sequential(nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 9, 3, padding=1))
    report = convert_and_report(nn.Sequential(Block(tiramisu), nn.Sequential(halving), nn.Sequential(activated_first)))
    assert [change.name for change in report.changed] == ["0"]
    assert not report.unchanged
