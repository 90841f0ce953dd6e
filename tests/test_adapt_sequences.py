"""Layers, blocks and transitions: in an nn.Sequential, however they are laid out, or called by the author's forward."""

import copy
import inspect
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from dense_families import Block, tiramisu
from grids import grid
from helpers import assert_close, convert_and_report, nodes_of
from test_adapt_exactness import layer_with
from third_party_models import (
    GROWTH,
    START,
    FunctionalTransition,
    NewestFirst,
    assert_restored,
    assert_same_training,
    block_batch,
    build_pair,
    convert_pair,
    features_block,
    image_batch,
    loss_of,
    pooled_transition,
)
from torch import Tensor, nn

from efficient_densenet import make_efficient, restore
from efficient_densenet.memory import saved_bytes


class OldestFirst(NewestFirst):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return torch.cat([x, output[:, :GROWTH]], 1)


def _stages(layer: type[nn.Module]) -> tuple[list[nn.Module], ...]:
    """A convolution, a block, a transition, a block and a norm, as lists of modules."""
    block1, block2 = ([layer(channels + i * GROWTH) for i in range(3)] for channels in (START, 8))
    transition = list(pooled_transition(START + 3 * GROWTH, 8))
    return [nn.Conv2d(3, START, 3, padding=1)], block1, transition, block2, [nn.BatchNorm2d(8 + 3 * GROWTH)]


def _transition_last(stem, block1, transition, block2, norm):
    return nn.Sequential(*stem, nn.Sequential(*block1, nn.Sequential(*transition)), nn.Sequential(*block2), *norm)


def _transition_first(stem, block1, transition, block2, norm):
    return nn.Sequential(*stem, nn.Sequential(*block1), nn.Sequential(nn.Sequential(*transition), *block2), *norm)


def _flat(*stages):
    return nn.Sequential(*itertools.chain(*stages))


LAYOUTS = [_transition_last, _transition_first, _flat]


@pytest.mark.parametrize(*grid(layout=LAYOUTS, layer=[NewestFirst, OldestFirst], strength=1))
def test_layers_in_a_row_are_a_block_joined_with_the_transition_after_it(layout, layer):
    model, plain, report = convert_pair(layout(*_stages(layer)).double())
    x = torch.randn(3, 3, 9, 8).double()
    assert [(change.layers, change.engine) for change in report.changed] == [(3, "shared")] * 2, str(report)
    assert_same_training(model, plain, x)
    names = nodes_of(model(x))
    assert names.count("SharedStage") == 2
    in_one_module = layout in (_transition_last, _transition_first)
    assert ("AvgPool2D" not in names) == in_one_module  # the transition is in the stage
    assert_restored(model, plain)


def test_a_flat_network_saves_as_much_as_one_with_blocks_and_a_second_report_repeats_the_first():
    model, x = _flat(*_stages(OldestFirst)), torch.randn(4, 3, 32, 32)
    plain = saved_bytes(lambda: model(x))
    report = convert_and_report(model)
    assert saved_bytes(lambda: model(x)) < 0.3 * plain
    assert [change.name for change in report.changed] == ["1 to 3", "8 to 10"]
    assert "1 to 3: 3 layers, shared" in str(report)
    assert str(convert_and_report(model)) == str(report)


INTERRUPTIONS = {
    "hook": lambda layer: layer.register_forward_hook(lambda module, args, output: output * 2),
    "forward": lambda layer: setattr(layer, "forward", lambda x, forward=layer.forward: forward(x) * 2),
    "eval": lambda layer: layer.eval(),
}


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_a_layer_in_a_row_that_differs_is_run_by_itself(interruption):
    model, plain, _ = convert_pair(_flat(*_stages(OldestFirst)).double())
    for each in (model, plain):
        INTERRUPTIONS[interruption](each[2])
    assert_same_training(model, plain, torch.randn(3, 3, 9, 8).double())


@pytest.mark.parametrize("part", [slice(0, 2), slice(1, None)])
def test_a_slice_of_a_converted_block_runs_and_can_be_restored(part):
    block, plain, _ = convert_pair(nn.Sequential(*_stages(OldestFirst)[1]).double())
    x = torch.randn(3, START + GROWTH * (part.start or 0), 6, 5, dtype=torch.double)
    assert_same_training(block[part], plain[part], x)
    assert type(restore(block[part])) is nn.Sequential
    assert_same_training(block[part], plain[part], x)
    assert [change.layers for change in convert_and_report(block[part]).changed] == [2]
    assert [change.layers for change in convert_and_report(block).changed] == [3]
    assert_restored(block, plain)


def test_tracing_into_a_converted_block_warns_and_a_leaf_keeps_its_engine():
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model, x = nn.Sequential(nn.Conv2d(START, START, 1), Block(tiramisu)).double().eval(), block_batch()
    make_efficient(model)
    leaves = {"tracer_kwargs": {"leaf_modules": [Block]}}
    kept = extraction.create_feature_extractor(model, ["1"], **leaves)
    with pytest.warns(UserWarning, match=r"traces into a Block.*Keep such blocks as leaf modules"):
        traced = torch.fx.symbolic_trace(model)
    saved, saved_in_graph = (saved_bytes(lambda each=each: each(x)) for each in (kept.train(), traced.train()))
    assert saved < saved_in_graph
    torch.testing.assert_close(kept.eval()(x)["1"], traced.eval()(x))


def test_a_converted_module_has_the_author_s_signature_and_takes_its_argument_by_name():
    (model, plain), x = build_pair("kuangliu"), image_batch("kuangliu")
    signatures = [inspect.signature(module.forward) for module in model.modules()]
    make_efficient(model)
    assert [inspect.signature(module.forward) for module in model.modules()] == signatures
    features = model.features(input=x)
    loss_of(features).backward()
    assert_close(features.detach(), plain.features(input=x).detach())


class TransitionDown(nn.Sequential):
    """As in a tiramisu: with a bias, dropout and max pooling."""

    def __init__(self, channels: int, compressed: int) -> None:
        conv = nn.Conv2d(channels, compressed, 1)
        super().__init__(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), conv, nn.Dropout2d(0.2), nn.MaxPool2d(2))


class Net(nn.Module):
    """Blocks and transitions as attributes, called one after another, the features of each kept for a decoder."""

    def __init__(self, transition: type[nn.Module], skips: bool = False) -> None:
        super().__init__()
        channels = START + 2 * GROWTH
        self.block1, self.trans1 = features_block(), transition(channels, START)
        self.block2, self.trans2 = features_block(), transition(channels, START)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        skip = self.block1(x)
        x = self.trans2(self.block2(self.trans1(skip)))
        return x + skip.mean() if self.skips else x


def _images() -> Tensor:
    torch.manual_seed(5)
    return torch.randn(3, START, 9, 8, dtype=torch.double)


def _functional(pool: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    return layer_with(FunctionalTransition, forward=lambda s, x: pool(s.conv(F.relu(s.bn(x)))))


TRANSITIONS = [
    FunctionalTransition,
    TransitionDown,
    _functional(partial(F.max_pool2d, kernel_size=2)),
    _functional(lambda x: x),
]


@pytest.mark.parametrize(*grid(transition=TRANSITIONS, skips=[False, True], strength=1))
def test_a_transition_called_by_the_author_s_forward_is_a_stage_of_its_own(transition, skips):
    model, plain, report = convert_pair(Net(transition, skips).double())
    assert report.transitions == ["trans1", "trans2"]
    assert not {name for name in nodes_of(copy.deepcopy(model)(_images())) if "BatchNorm" in name}
    assert_same_training(model, plain, _images())
    assert_restored(model, plain)


def test_what_pools_otherwise_is_left_alone():
    ceil_mode = _functional(partial(F.avg_pool2d, kernel_size=2, ceil_mode=True))
    model, plain, report = convert_pair(Net(ceil_mode).double())
    assert not report.transitions
    assert_same_training(model, plain, _images())


def _freeze(model: nn.Module) -> None:
    model.eval().trans1.requires_grad_(False)
    model.block1.train()


ALTERED = {
    "another convolution": lambda model: setattr(model.trans1, "conv", nn.Sequential(model.trans1.conv, nn.Tanh())),
    "a hook": lambda model: model.trans1.register_forward_hook(lambda module, args, output: output * 2),
    "a hook inside": lambda model: model.trans2.bn.register_forward_hook(lambda module, args, output: output * 2),
    "frozen": _freeze,
}


@pytest.mark.parametrize("change", ALTERED)
def test_a_transition_altered_after_conversion_computes_what_the_plain_one_does(change):
    model, plain, _ = convert_pair(Net(FunctionalTransition).double())
    for each in (model, plain):
        ALTERED[change](each)
    assert_same_training(model, plain, _images())
    with torch.no_grad():
        assert_close(model.eval()(_images()), plain.eval()(_images()))
