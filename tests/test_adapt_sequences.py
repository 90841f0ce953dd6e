"""Layers, blocks and transitions in an nn.Sequential, however they are laid out, and slices of it."""

import copy
import inspect
import itertools

import pytest
import torch
from dense_families import Block, tiramisu
from grids import grid
from helpers import assert_close, convert_and_report, nodes_of
from third_party_models import (
    CLASSES,
    GROWTH,
    START,
    NewestFirst,
    assert_same_training,
    block_batch,
    build,
    image_batch,
    loss_of,
    plain_reference,
)
from torch import Tensor, nn

from efficient_densenet import make_efficient, restore
from efficient_densenet.memory import saved_bytes


class OldestFirst(NewestFirst):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return torch.cat([x, output[:, :GROWTH]], 1)


def _layers(layer: type[nn.Module], channels: int, count: int = 3) -> list[nn.Module]:
    return [layer(channels + i * GROWTH) for i in range(count)]


def _transition(channels: int, compressed: int) -> list[nn.Module]:
    conv = nn.Conv2d(channels, compressed, 1, bias=False)
    return [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), conv, nn.AvgPool2d(2)]


def _head(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


def _stages(layer: type[nn.Module]) -> tuple[list[nn.Module], ...]:
    """A convolution, a block, a transition, a block and a head, as lists of modules."""
    channels = START + 3 * GROWTH
    return (
        [nn.Conv2d(3, START, 3, padding=1)],
        _layers(layer, START),
        _transition(channels, 8),
        _layers(layer, 8),
        _head(8 + 3 * GROWTH),
    )


def _transition_last(stem, block1, transition, block2, head):
    return nn.Sequential(*stem, nn.Sequential(*block1, nn.Sequential(*transition)), nn.Sequential(*block2), *head)


def _transition_first(stem, block1, transition, block2, head):
    return nn.Sequential(*stem, nn.Sequential(*block1), nn.Sequential(nn.Sequential(*transition), *block2), *head)


def _flat(*stages):
    return nn.Sequential(*itertools.chain(*stages))


def _flat_after_the_stem(stem, *rest):
    return nn.Sequential(nn.Sequential(*stem), _flat(*rest))


LAYOUTS = [_transition_last, _transition_first, _flat, _flat_after_the_stem]


@pytest.mark.parametrize(*grid(layout=LAYOUTS, layer=[NewestFirst, OldestFirst], strength=1))
def test_layers_in_a_row_are_a_block_joined_with_the_transition_after_it(layout, layer):
    model = layout(*_stages(layer)).double()
    plain, classes, x = copy.deepcopy(model), list(map(type, model.modules())), torch.randn(3, 3, 9, 8).double()
    report = convert_and_report(model)
    assert [(change.layers, change.engine) for change in report.changed] == [(3, "shared")] * 2, str(report)
    assert_same_training(model, plain, x)
    names = nodes_of(model(x))
    assert names.count("SharedStage") == 2
    in_one_module = layout in (_transition_last, _transition_first)
    assert ("AvgPool2D" not in names) == in_one_module  # the transition is in the stage
    restore(model)
    assert list(map(type, model.modules())) == classes


def test_a_flat_network_saves_as_much_as_one_with_blocks_and_a_second_report_repeats_the_first():
    model, x = _flat(*_stages(OldestFirst)), torch.randn(4, 3, 32, 32)
    plain = saved_bytes(lambda: model(x))
    report = convert_and_report(model)
    assert saved_bytes(lambda: model(x)) < 0.3 * plain
    assert [change.name for change in report.changed] == ["1 to 3", "8 to 10"]
    assert "1 to 3: 3 layers, shared" in str(report)
    assert str(convert_and_report(model)) == str(report)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("interruption", ["hook", "forward", "eval"])
def test_a_layer_in_a_row_that_differs_is_run_by_itself(interruption):
    model = _flat(*_stages(OldestFirst)).double()
    plain, x = copy.deepcopy(model), torch.randn(3, 3, 9, 8).double()
    make_efficient(model)
    calls = []
    for each in (model, plain):
        if interruption == "hook":
            each[2].register_forward_hook(lambda module, args, output: calls.append(output.detach()))
        elif interruption == "forward":
            each[2].forward = lambda x, forward=each[2].forward: forward(x) * 2
        else:
            each[2].eval()
    assert_same_training(model, plain, x)
    if interruption == "hook":
        assert len(calls) == 6
        for ours, expected in zip(calls[:3], calls[3:], strict=True):
            assert_close(ours, expected)


@pytest.mark.parametrize("part", [slice(0, 2), slice(1, None)])
def test_a_slice_of_a_converted_block_runs_and_can_be_restored(part):
    block = nn.Sequential(*_layers(OldestFirst, START)).double()
    plain = copy.deepcopy(block)
    assert len(convert_and_report(block)) == 1
    x = torch.randn(3, START + GROWTH * (part.start or 0), 6, 5, dtype=torch.double)
    assert_same_training(block[part], plain[part], x)
    assert type(restore(block[part])) is nn.Sequential
    assert_same_training(block[part], plain[part], x)
    assert [change.layers for change in convert_and_report(block[part]).changed] == [2]
    assert [change.layers for change in convert_and_report(block).changed] == [3]
    restore(block)
    assert list(map(type, block.modules())) == list(map(type, plain.modules()))


def test_tracing_into_a_converted_block_warns_and_a_leaf_keeps_its_engine():
    class KeepsBlocks(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Block) or super().is_leaf_module(m, module_qualified_name)

    model, x = nn.Sequential(nn.Conv2d(START, START, 1), Block(tiramisu)).double(), block_batch()
    make_efficient(model)
    with pytest.warns(UserWarning, match=r"traces into a Block.*Keep such blocks as leaf modules"):
        traced = torch.fx.symbolic_trace(model.eval())
    kept = torch.fx.GraphModule(model, KeepsBlocks().trace(model))
    saved, saved_in_graph = (saved_bytes(lambda each=each: each(x)) for each in (kept, traced))
    assert saved == saved_bytes(lambda: model(x)) < saved_in_graph
    torch.testing.assert_close(kept(x), traced(x))


def test_a_converted_module_has_the_author_s_signature_and_takes_its_argument_by_name():
    model = build("kuangliu")
    plain, x = plain_reference("kuangliu", model), image_batch("kuangliu")
    signatures = [inspect.signature(module.forward) for module in model.modules()]
    make_efficient(model)
    assert [inspect.signature(module.forward) for module in model.modules()] == signatures
    features = model.features(input=x)
    loss_of(features).backward()
    assert_close(features.detach(), plain.features(input=x).detach())
