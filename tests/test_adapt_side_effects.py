"""Blocks whose forward does more than compute its output are left alone: an engine would not, or would do it twice."""

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from dense_families import Block, tiramisu
from helpers import assert_close, convert_and_report
from test_adapt_exactness import layer_with
from third_party_models import GROWTH, START, FunctionalTransition, LayerHalves, assert_same_training, convert_pair
from torch import Tensor, nn

X = torch.randn(3, START, 6, 5, dtype=torch.double)
_skips: list[Tensor] = []


def block_that(effect: Callable[[Any, Tensor, Tensor], object], held: object = None) -> Callable[[], nn.Module]:
    """A block whose forward has an effect by what it holds, its input and its output."""

    def forward(self: Any, x: Tensor) -> Tensor:
        output = Block.forward(self, x)
        effect(self, x, output)
        return output

    def build() -> nn.Module:
        block = layer_with(Block, forward=forward, large=[])(tiramisu)
        block.held = copy.copy(held)
        return block

    return build


def _add(count: Tensor) -> None:
    count.add_(1)


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


class _OwnNorm(nn.Module):
    """A norm whose running statistics a recomputation would update a second time."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, GROWTH, 3, padding=1)
        self.register_buffer("running_mean", torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(x.mean((0, 2, 3))[:, None, None], 0.1)
        return self.conv(F.relu(x - self.running_mean))


# Each: a block, and why it is left alone.
BLOCKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "keeps its output": (block_that(lambda s, x, y: setattr(s, "held", y)), "held of a OddBlock has changed"),
    "appends to its list": (block_that(lambda s, x, y: s.held.append(x.mean()), []), "held of a OddBlock has changed"),
    "counts in a tensor by a function": (
        block_that(lambda s, x, y: _add(s.held), torch.zeros(())),
        "writes to a tensor that is not its own",
    ),
    "holds a script": (lambda: Block(_LayerWithAScript), "holds a ScriptModule, whose code is not Python's"),
    "appends to a global list": (block_that(lambda s, x, y: _skips.append(y)), "after its forward _skips in "),
    "appends to a list of its class": (
        block_that(lambda s, x, y: s.large.append(x) if x.mean() > 1e3 else None),
        "decides by values of tensors, and may write to large of a OddBlock",
    ),
    "hands its output on": (block_that(lambda s, x, y: s.held.append(y), deque()), "held of a OddBlock has changed"),
    "hooks its input": (
        block_that(lambda s, x, y: x.register_hook(lambda grad: grad / 2) if x.requires_grad else None),
        "registers a hook on its input, which would see another",
    ),
    "counts": (lambda: Block(_CountingLayer), "after its forward calls of a _CountingLayer has changed"),
    "norm of its own": (lambda: Block(_OwnNorm), "after its forward layers.0.running_mean has changed"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_whose_forward_has_side_effects_is_left_alone_and_reported(kind):
    build, reason = BLOCKS[kind]
    block, plain, report = convert_pair(build().double())
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
    transition = KeepsWhatItPools(START + 3 * GROWTH, 8)
    model, plain, report = convert_pair(nn.Sequential(Block(tiramisu), transition).double())
    assert len(report) == 1
    assert not report.transitions
    assert_same_training(model, plain, X)
    assert_close(model[1].before_pooling, plain[1].before_pooling)


def test_a_block_with_a_name_that_converted_blocks_need_is_left_alone():
    report = convert_and_report(layer_with(Block, engine=lambda self: "its own")(tiramisu))
    assert report.unchanged == {"": "found engine in a OddBlock, a name that converted blocks need themselves"}


def test_a_module_that_concatenates_nothing_is_no_block():
    halving = nn.Sequential(nn.BatchNorm2d(18), nn.Conv2d(18, 9, 1, bias=False), nn.AvgPool2d(2))
    activated_first = nn.Sequential(nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 9, 3, padding=1))
    report = convert_and_report(nn.Sequential(Block(tiramisu), nn.Sequential(halving), nn.Sequential(activated_first)))
    assert [change.name for change in report.changed] == ["0"]
    assert not report.unchanged
