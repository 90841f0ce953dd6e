"""Blocks that return only their new channels, without those of their input."""

import copy

import pytest
import torch
from grids import grid
from helpers import (
    MEMORY_EFFICIENT,
    add_conv_biases,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    assert_same_values,
    plan_stage,
    use_kernels,
)
from test_parts import CONSUMERS, GROWTH, Block, _block_parts, _randomized
from torch import Tensor, nn

from efficient_densenet import DenseBlock
from efficient_densenet.engine import choose, parts
from efficient_densenet.engine.refuse import joined_consumer

NEW = 3 * GROWTH


class NewFeatures(Block):
    """The block of the parts' tests without the channels of its input."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output[:, :NEW] if self[0].newest_first else output[:, -NEW:]


def _parts(block: NewFeatures) -> parts.BlockParts:
    read = _block_parts(block)
    return parts.BlockParts(read.layers, read.newest_first, new_features_only=True)


parts.register_block(NewFeatures, _parts)


@pytest.mark.parametrize(
    *grid(
        newest_first=[True, False],
        bottleneck=[True, False],
        frozen=[False, True],
        drop_rate=[0.0, 0.3],
        biases=[False, True],
        memory_format=[torch.contiguous_format, torch.channels_last],
        kernels=[("portable", 1 << 22), ("compiled", 7)],
    )
)
def test_output_gradients_and_buffers_match_plain(
    newest_first, bottleneck, frozen, drop_rate, biases, memory_format, kernels, monkeypatch
):
    use_kernels(monkeypatch, *kernels)
    (plain,) = _randomized(NewFeatures(bottleneck, newest_first, drop_rate))
    if biases:
        add_conv_biases(plain)
    plain.train(not frozen)
    block, x = copy.deepcopy(plain), torch.randn(3, 4, 7, 6, dtype=torch.double).to(memory_format=memory_format)
    output, _ = assert_same_values(lambda x: plan_stage(block, None, x).run(x)[0], plain, x)
    assert output.shape == (3, NEW, 7, 6)
    assert output.is_contiguous(memory_format=memory_format)
    assert_same_gradients(block, plain)
    assert_same_buffers(block, plain)


def test_such_a_block_is_not_joined_with_what_follows():
    (block,) = _randomized(NewFeatures())
    consumer = CONSUMERS["transition"]().double()
    assert joined_consumer(_block_parts(block), consumer) is not None
    assert joined_consumer(parts.parts_of(block), consumer) is None


@pytest.mark.parametrize("engine", [*MEMORY_EFFICIENT, True])
@pytest.mark.parametrize("bn_size", [0, 2])
def test_a_dense_block_of_this_package(engine, bn_size):
    plain = DenseBlock(3, 5, 4, bn_size, drop_rate=0.2, efficient=False, new_features_only=True).double()
    whole = DenseBlock(3, 5, 4, bn_size, drop_rate=0.2, efficient=False).double()
    whole.load_state_dict(plain.state_dict())
    assert (plain.num_output_features, whole.num_output_features) == (12, 17)
    efficient = copy.deepcopy(plain)
    efficient.engine = choose.parse(engine)
    x = torch.randn(2, 5, 6, 7, dtype=torch.double)
    assert_same_step(efficient, plain, x)
    assert_same_buffers(efficient, plain)
    assert_same_values(plain, lambda x: whole(x)[:, -12:], x)


def test_a_block_of_this_package_before_a_norm_of_its_new_channels_runs_alone():
    block = DenseBlock(2, 5, 3, efficient="shared", new_features_only=True).double()
    consumer = nn.BatchNorm2d(6).double()
    x = torch.randn(2, 5, 6, 7, dtype=torch.double)
    assert choose.join(block, consumer, x) is None
    output = block(x)
    assert output.shape[1] == 6
    normalized, features = choose.run_stage_with_features(block, consumer, x)
    assert_close(features, output)
    assert normalized.shape == features.shape
