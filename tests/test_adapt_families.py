"""Dense blocks of other families: what their layers hold, in which order, and what the blocks return."""

import copy

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from third_party_models import GROWTH, START, LayerHalves, assert_same_training, block_batch
from torch import Tensor, nn

from efficient_densenet import make_efficient
from efficient_densenet.memory import saved_bytes


class SqueezeAndExcite(LayerHalves):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.down, self.up = nn.Linear(GROWTH, 2), nn.Linear(2, GROWTH)

    def forward(self, x: Tensor) -> Tensor:
        output = self.second_half(self.first_half(x))
        weight = self.up(F.relu(self.down(output.mean((2, 3))))).sigmoid()
        return output * weight[:, :, None, None]


class TwoDropouts(LayerHalves):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.dropout1, self.dropout2 = nn.Dropout(0.2), nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout2(self.second_half(self.dropout1(self.first_half(x))))


def conv_norm_relu(channels: int) -> nn.Module:
    conv1, conv2 = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, GROWTH, 3, padding=1)
    return nn.Sequential(conv1, nn.BatchNorm2d(8), nn.ReLU(), conv2, nn.BatchNorm2d(GROWTH), nn.ReLU())


def separable(channels: int) -> nn.Module:
    depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), depthwise, nn.Conv2d(channels, GROWTH, 1))


def tiramisu(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, GROWTH, 3, padding=1), nn.Dropout(0.2)
    )


class Block(nn.Module):
    """A block whose own forward concatenates, in either order, and returns its input too or not."""

    def __init__(self, layer, newest_first: bool = False, returns_input: bool = True) -> None:
        super().__init__()
        self.newest_first, self.returns_input = newest_first, returns_input
        self.layers = nn.ModuleList(layer(START + i * GROWTH) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            output = layer(torch.cat(features, 1))
            features = [output, *features] if self.newest_first else [*features, output]
        if not self.returns_input:
            del features[-1 if self.newest_first else 0]
        return torch.cat(features, 1)


class Concatenating(nn.Module):
    """A layer that concatenates its input and its output."""

    def __init__(self, layer, channels: int, newest_first: bool) -> None:
        super().__init__()
        self.layer, self.newest_first = layer(channels), newest_first

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        return torch.cat([output, x] if self.newest_first else [x, output], 1)


LAYERS = [SqueezeAndExcite, TwoDropouts, conv_norm_relu, separable]


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize(
    *grid(layer=LAYERS, newest_first=[False, True], kind=["all", "new features only", "concatenating layers"])
)
def test_layers_of_any_kind_run_through_the_checkpoint_engine_and_save_memory(layer, newest_first, kind):
    if kind == "concatenating layers":
        block = nn.Sequential(*(Concatenating(layer, START + i * GROWTH, newest_first) for i in range(3)))
    else:
        block = Block(layer, newest_first, returns_input=kind == "all")
    block, x = block.double(), torch.randn(2, START, 16, 16, dtype=torch.double)
    plain, saved = copy.deepcopy(block), saved_bytes(lambda: block(x))
    block = copy.deepcopy(plain)
    report = make_efficient(block)
    assert len(report) == 1
    assert report.changed[0].engine.startswith("checkpoint (found ")
    assert report.changed[0].layers == 3
    assert_same_training(block, plain, block_batch())
    kept = (START + 2 * GROWTH) * x[:, 0].nbytes  # the input of the last layer, in parts
    assert saved_bytes(lambda: block(x)) == kept < 0.5 * saved


class UnequalGrowth(Block):
    def __init__(self) -> None:
        super().__init__(tiramisu)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, k, 3, padding=1)) for c, k in ((6, 4), (10, 8))
        )


@pytest.mark.filterwarnings("ignore:falling back")
def test_unequal_growth_runs_through_the_checkpoint_engine_and_is_named():
    block = UnequalGrowth().double()
    plain = copy.deepcopy(block)
    (changed,) = make_efficient(block).changed
    assert changed.engine == "checkpoint (found layers that add 4, 8 channels, where all must add the same)"
    assert_same_training(block, plain, block_batch())


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("returns_input", [True, False])
def test_blocks_of_a_tiramisu_run_by_the_shared_engine(newest_first, returns_input):
    block = Block(tiramisu, newest_first, returns_input).double()
    plain = copy.deepcopy(block)
    assert [change.engine for change in make_efficient(block).changed] == ["shared"]
    assert_same_training(block, plain, block_batch())
