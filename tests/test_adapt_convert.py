"""Conversions beside the usual: second names, tracing by torch.fx, constants of activations, hooks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from third_party_models import assert_same_training
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

from efficient_densenet import make_efficient
from efficient_densenet.adapt.trial import Trial
from efficient_densenet.memory import saved_bytes

CHANNELS, GROWTH, LAYERS = 6, 3, 3
pytestmark = pytest.mark.filterwarnings("ignore:falling back from engine 'shared' to 'checkpoint'")


def layer(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, GROWTH, 3, padding=1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(CHANNELS + i * GROWTH) for i in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = torch.cat([x, each(x)], 1)
        return x


class WithSecondName(Block):
    """A module of the last layer has a name in the block too."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = self.layers[-1][1]


def batch() -> Tensor:
    return torch.randn(2, CHANNELS, 5, 6, dtype=torch.double)


@pytest.mark.parametrize("parametrized", [False, True])
def test_a_module_with_a_second_name_does_not_stop_a_conversion(parametrized):
    block = WithSecondName().double()
    if parametrized:
        for each in block.layers:
            parametrizations.weight_norm(each[2])
    plain = copy.deepcopy(block)
    (changed,) = make_efficient(nn.Sequential(block)).changed
    assert changed.engine.partition(" ")[0] == ("checkpoint" if parametrized else "shared")
    assert_same_training(block, plain, batch())


def test_tracing_into_a_converted_block_warns_and_a_leaf_keeps_its_engine():
    class KeepsBlocks(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Block) or super().is_leaf_module(m, module_qualified_name)

    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), Block()).double()
    make_efficient(model)
    with pytest.warns(UserWarning, match=r"traces into a Block.*Keep such blocks as leaf modules"):
        traced = fx.symbolic_trace(model)
    kept = fx.GraphModule(model, KeepsBlocks().trace(model))
    x = batch()
    saved, saved_in_graph = (saved_bytes(lambda each=each: each(x)) for each in (kept, traced))
    assert saved == saved_bytes(lambda: model(x)) < saved_in_graph
    torch.testing.assert_close(kept(x), traced(x))


class NormLast(nn.Module):
    """As the layers of an ordinary network: convolution, norm, activation."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Aggregating(nn.Module):
    """As in HGNetV2: what all layers return is concatenated once."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NormLast(channels, channels) for _ in range(4))
        self.end = nn.Sequential(nn.Conv2d(5 * channels, channels, 1), nn.BatchNorm2d(channels), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for each in self.layers:
            outputs.append(each(outputs[-1]))
        return self.end(torch.cat(outputs, 1))


def test_modules_that_cannot_be_dense_are_ruled_out_by_a_run_at_most(monkeypatch):
    runs, run_once = [], Trial.run_once
    monkeypatch.setattr(Trial, "run_once", lambda self, *args: runs.append(self.module) or run_once(self, *args))
    assert not make_efficient(nn.Sequential(*(Aggregating(CHANNELS) for _ in range(3))))
    assert len(runs) == len(set(runs))
    assert set(map(type, runs)) <= {NormLast}


class Leaky(nn.Module):
    """Layers whose activation is a function; `slope_of(layer)` is its constant."""

    def __init__(self, slope_of, slope: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LeakyLayer(CHANNELS + i * GROWTH, slope_of, slope) for i in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = torch.cat([x, each(x)], 1)
        return x


class LeakyLayer(nn.Module):
    def __init__(self, channels: int, slope_of, slope: float) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(channels), nn.LeakyReLU(slope)
        self.conv, self.slope_of = nn.Conv2d(channels, GROWTH, 3, padding=1), slope_of

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.leaky_relu(self.norm(x), self.slope_of(self)))


class Slopes(dict):
    __getattr__ = dict.__getitem__


SLOPES = Slopes(usual=0.2)


def function_with_slope(slope: float):
    def slope_of(layer: nn.Module) -> float:
        return slope_of.slope

    slope_of.slope = slope
    return slope_of


class Settings:
    """A helper that reads settings of a module under names that the layer's methods do not have."""

    @staticmethod
    def slope_of(layer: nn.Module) -> float:
        return getattr(layer.act, "_".join(("negative", "slope")))


def test_blocks_that_look_alike_are_each_tried():
    model = nn.ModuleList(Leaky(function_with_slope(slope)) for slope in (0.1, 0.7)).double()
    plain = copy.deepcopy(model)
    plain[1].layers[0].slope_of = model[1].layers[0].slope_of
    make_efficient(model)
    for ours, theirs in zip(model, plain, strict=True):
        assert_same_training(ours, theirs, batch())


@pytest.mark.filterwarnings("ignore:falling back")
def test_settings_that_other_code_reads_are_watched():
    block = Leaky(Settings.slope_of).double()
    plain = copy.deepcopy(block)
    make_efficient(block)
    for each in (block, plain):
        each.layers[1].act.negative_slope = 0.7
    assert_same_training(block, plain, batch())


def test_a_global_object_that_has_no_usual_attributes_is_read():
    block = Leaky(lambda layer: SLOPES.usual).double()
    plain = copy.deepcopy(block)
    make_efficient(block)
    assert_same_training(block, plain, batch())


class Hooks(Block):
    """Halves the gradient of its input, wherever the input comes from."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad / 2)
        return super().forward(x)


class Around(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Conv2d(CHANNELS, CHANNELS, 1), block, nn.Conv2d(CHANNELS, 15, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.block(h) + self.last(h)


def test_a_block_that_registers_a_hook_on_its_input_is_left_alone():
    model = Around(Hooks()).double()
    plain = copy.deepcopy(model)
    assert not make_efficient(model)
    assert_same_training(model, plain, batch())


@pytest.mark.filterwarnings("ignore:falling back")
def test_norms_whose_forward_is_replaced_later_update_once():
    block = Block().double()
    plain = copy.deepcopy(block)
    make_efficient(block)
    for each in (block, plain):
        for module in each.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.forward = lambda x, forward=module.forward: forward(x)
    assert_same_training(block, plain, batch())
