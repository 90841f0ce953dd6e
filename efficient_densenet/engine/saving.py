"""What the best engine saves although nobody asks for it: what leaves a step's peak as it is. And where it runs plain.

A step holds most in the backward of the first stage: its features, their gradient and some scratch. What later stages
have saved is freed by then, and so they may save as much as lies between their own peaks and that of the first stage.
Sizes are enough to know how much that is: they count the first stage's scratch low, and that of later stages high.

On few pixels a step holds little but gradients of weights: the shared engine those of a whole stage at once, plain
modules those of one layer. Plain modules run where this is more than all that they save.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .._tensors import compute_dtype
from ..norms.frozen import uses_running_statistics
from .parts import NoPartsError, consumer_parts, parts_of

SMALLEST_INPUT = 64
"""Channels that a layer reads: with fewer, it is faster to compute its bottleneck again than to write and read it."""


class BlockSizes(NamedTuple):
    """The sizes of a block.

    Attributes:
        channels: of its features.
        weights: of its convolutions.
        inputs: the channels that its convolutions read, the sum of all.
        columns: the most values for a pixel that a convolution's im2col has.
        saved: the channels of the bottlenecks that are saved by request.
        layers: the channels that each layer reads and the width of its bottleneck, of layers that leave it open.
        trains: whether its norms have batch statistics.
    """

    channels: int
    weights: int
    inputs: int
    columns: int
    saved: int
    layers: tuple[tuple[int, int], ...]
    trains: bool

    @property
    def width(self) -> int:
        return max((width for _, width in self.layers), default=0)


class ConsumerSizes(NamedTuple):
    """Whether a consumer halves the sides, and the channels of its output, None if they are those of its input."""

    pools: bool
    channels: int | None


class StageSizes(NamedTuple):
    block: BlockSizes
    consumer: ConsumerSizes

    @property
    def places(self) -> tuple[()]:
        """Where the tensors are on which the sizes depend, as in the plan of a stage: there are none."""
        return ()


def stage_sizes(block: nn.Module, consumer: nn.Module) -> StageSizes | None:
    """The sizes of a stage; None where its parts are not known."""
    of_block, of_consumer = _block_sizes(block), _consumer_sizes(consumer)
    return None if of_block is None or of_consumer is None else StageSizes(of_block, of_consumer)


def _block_sizes(block: nn.Module) -> BlockSizes | None:
    """The sizes of a block, by its convolutions alone."""
    try:
        parts = parts_of(block)
    except NoPartsError:
        return None
    convolutions = [conv for layer in parts.layers for conv in layer.convolutions]
    if not convolutions or not all(isinstance(conv, _ConvNd) for conv in convolutions):
        return None
    first, last = parts.layers[0], parts.layers[-1]
    inside = [layer for layer in parts.layers if layer.norm2 is not None]
    return BlockSizes(
        channels=last.conv1.in_channels + last.last_conv.out_channels,
        weights=sum(conv.in_channels * conv.out_channels * math.prod(conv.kernel_size) for conv in convolutions),
        inputs=sum(conv.in_channels for conv in convolutions),
        columns=max(conv.in_channels * math.prod(conv.kernel_size) for conv in convolutions),
        saved=sum(layer.conv1.out_channels for layer in inside if layer.keep_bottleneck),
        layers=tuple(
            (each.conv1.in_channels, each.conv1.out_channels) for each in inside if each.keep_bottleneck is None
        ),
        trains=not uses_running_statistics(first.norm1),
    )


def _consumer_sizes(consumer: nn.Module) -> ConsumerSizes | None:
    parts = consumer_parts(consumer)
    if parts is None or not isinstance(parts.conv, (_ConvNd, type(None))):
        return None
    return ConsumerSizes(parts.pools, None if parts.conv is None else parts.conv.out_channels)


def num_saved(stages: Sequence[StageSizes | None], x: Tensor) -> Sequence[int] | None:
    """For each stage how many of its layers, the last ones, save their bottlenecks; None where plain modules hold less.

    The stages are all of a network; x is the input of the first.
    """
    known = tuple(stage for stage in stages if stage is not None)
    if len(known) < len(stages):
        return [0] * len(stages)
    return _num_saved(known, (x.shape[0], *x.shape[2:]), compute_dtype(x).itemsize)


@lru_cache(maxsize=256)
def _num_saved(stages: tuple[StageSizes, ...], shape: tuple[int, ...], itemsize: int) -> Sequence[int] | None:
    """`shape` is (N, *spatial) of the first block's input. All sums below are numbers of values."""
    held, spare, all_pixels, peak, shared, plain, columns = 0, [], [], 0, 0, 0, 0
    images, *sides = shape
    for block, consumer in stages:
        pixels = images * math.prod(sides)
        sides = [side // (1 + consumer.pools) for side in sides]
        features, output = pixels * block.channels, images * math.prod(sides) * (consumer.channels or block.channels)
        held += features + pixels * block.saved
        shared = max(shared, held + features + output + pixels * block.width * 3 + block.weights)
        plain += 2 * (pixels * block.inputs + features) + 3 * output  # each convolution's input and its norm's
        columns = max(columns, pixels * block.columns)
        if not peak:  # X, its gradient, the output's gradient and 2¼ bottlenecks
            peak = held + features + output + pixels * block.width * 9 // 4
        scratch = pixels * block.width * 9 // 2 + 2 * output + 2 * block.weights * 4 // itemsize
        spare.append(peak - held - features - scratch)
        all_pixels.append(pixels)
    if shared > plain + columns:
        return None
    counts, full = [0] * len(stages), set[int]()
    if not all(block.trains for block, _ in stages):
        return counts
    layers = [(*layer, i) for i, (block, _) in enumerate(stages) for layer in block.layers]
    for channels, width, i in sorted(layers, reverse=True):  # most multiplications for each value first
        size = all_pixels[i] * width
        if i == 0 or i in full or channels < SMALLEST_INPUT or min(spare[i:]) < size:
            full.add(i)
        else:
            counts[i] += 1
            spare[i:] = [each - size for each in spare[i:]]
    return counts
