"""Transitions that the author's forward calls itself: recognized, verified, and run as stages of their own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from helpers import assert_close, convert_and_report, nodes_of
from third_party_models import (
    GROWTH,
    START,
    FunctionalTransition,
    assert_same_training,
    build,
    features_block,
)
from torch import Tensor, nn

from efficient_densenet import make_efficient, restore
from efficient_densenet._dimensions import DIMENSIONS
from efficient_densenet.adapt.transitions import ConvertedTransition, convert_transition

WIDTH = START + 2 * GROWTH


class MaxPooling(FunctionalTransition):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.conv(F.relu(self.bn(x))), 2)


class TransitionDown(nn.Sequential):
    """As in a tiramisu: with a bias, dropout and max pooling."""

    def __init__(self, channels: int, compressed: int) -> None:
        conv = nn.Conv2d(channels, compressed, 1)
        super().__init__(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), conv, nn.Dropout2d(0.2), nn.MaxPool2d(2))


class WithoutPooling(FunctionalTransition):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.bn(x)))


class CeilMode(FunctionalTransition):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2, ceil_mode=True)


class Net(nn.Module):
    """Blocks and transitions as attributes, called one after another, the features of each kept for a decoder."""

    def __init__(self, transition) -> None:
        super().__init__()
        self.block1, self.trans1 = features_block(), transition(WIDTH, START)
        self.block2, self.trans2 = features_block(), transition(WIDTH, START)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        skip = self.block1(x)
        x = self.trans2(self.block2(self.trans1(skip)))
        return x + skip.mean() if self.skips else x


def _pair(transition: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    model = Net(transition).double()
    return model, copy.deepcopy(model)


def _images() -> Tensor:
    return torch.randn(3, START, 9, 8, dtype=torch.double)


TRANSITIONS = [FunctionalTransition, MaxPooling, TransitionDown, WithoutPooling]


@pytest.mark.parametrize("pool", ["AvgPool", "MaxPool"])
@pytest.mark.parametrize("dims", DIMENSIONS)
def test_transitions_of_signals_images_and_volumes_are_found(dims, pool):
    of_dims = DIMENSIONS[dims]
    pooling = getattr(of_dims, pool)(2)
    assert convert_transition(nn.Sequential(of_dims.BatchNorm(6), nn.ReLU(), of_dims.Conv(6, 3, 1), pooling))


@pytest.mark.parametrize(*grid(transition=TRANSITIONS, skips=[False, True], strength=1))
def test_a_transition_called_by_the_author_s_forward_is_a_stage_of_its_own(transition, skips):
    model = Net(transition).double()
    model.skips = skips
    plain, classes = copy.deepcopy(model), list(map(type, model.modules()))
    assert convert_and_report(model).transitions == ["trans1", "trans2"]
    assert not {name for name in nodes_of(model(_images())) if "BatchNorm" in name}
    model.load_state_dict(plain.state_dict())
    assert_same_training(model, plain, _images())
    restore(model)
    assert list(map(type, model.modules())) == classes


def test_functional_transitions_in_a_sequence_join_the_block_before():
    assert convert_and_report(build("kuangliu")).transitions == ["features.transition1", "features.transition2"]


def test_what_pools_otherwise_is_left_alone():
    model, plain = _pair(CeilMode)
    assert not convert_and_report(model).transitions
    assert_same_training(model, plain, _images())


def test_a_transition_altered_after_conversion_runs_its_own_forward():
    model, plain = _pair(FunctionalTransition)
    make_efficient(model)
    for each in (model, plain):
        each.trans1.conv = nn.Sequential(each.trans1.conv, nn.Tanh())
    assert_same_training(model, plain, _images())
    make_efficient(model)
    assert isinstance(model.trans2, ConvertedTransition)


def test_hooks_on_a_transition_and_inside_it_are_called():
    model, plain = _pair(TransitionDown)
    make_efficient(model)
    calls = []
    for each in (model, plain):
        for module in (each.trans1, each.trans2[1]):
            module.register_forward_hook(lambda module, args, output: calls.append(type(module).__name__))
    assert_same_training(model, plain, _images())
    assert calls == ["TransitionDown", "ReLU"] * 6


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_transitions_and_eval_mode(frozen):
    (model, plain), x = _pair(FunctionalTransition), _images()
    make_efficient(model)
    for each in (model, plain):
        each.eval()
        if frozen:
            each.block1.train()
        each.trans1.requires_grad_(False)
    assert_same_training(model, plain, x)
    with torch.no_grad():
        assert_close(model(x), plain(x))
