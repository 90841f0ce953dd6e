"""Which bottlenecks `efficient=True` saves by default, and where it runs plain modules.

A step holds most in the backward of the first stage: its features, their gradient and some scratch. What later stages
have saved is freed by then, and so they may save as much as lies between their own peaks and that of the first stage.
Sizes are enough to know how much that is: they count the first stage's scratch low, and that of later stages high.

On few pixels a step holds little but gradients of weights: the shared engine those of a whole stage at once, plain
modules those of one layer. Plain modules run where this is more than all that they save. Elsewhere all bottlenecks are
saved if they are small beside these gradients: to compute them again would take longer than plain modules do.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..norms.frozen import uses_running_statistics
from .parts import NoPartsError, consumer_parts, parts_of

SMALL_PART = 8
"""All bottlenecks are saved where they take at most this part of what the gradients of all weights take."""

SMALL_SCRATCH = 1 << 17
"""The bytes up to which one layer's packed weights and partial sums count as half of what a stage's weights take; its
tiles, of at most `TILE_PIXELS` pixels, count up to half as many bytes."""
TILE_PIXELS = 192

SMALLEST_INPUT = 64
"""Channels that a layer reads: with fewer, it is faster to compute its bottleneck again than to write and read it."""


class StageSizes(NamedTuple):
    """The sizes of a block and of its consumer.

    Attributes:
        channels: of the block's features.
        weights: the shapes of the weights of the block's convolutions.
        consumer_weight: that of the consumer's convolution, if it has one.
        pools: whether the consumer halves the sides.
        saved: the channels of the bottlenecks that are saved by request.
        layers: the channels that each layer reads and the width of its bottleneck, of layers that leave it open.
        trains: whether the block's norms have batch statistics.
    """

    channels: int
    weights: tuple[torch.Size, ...]
    consumer_weight: torch.Size | None
    pools: bool
    saved: int
    layers: tuple[tuple[int, int], ...]
    trains: bool


def stage_sizes(block: nn.Module, consumer: nn.Module) -> StageSizes | None:
    """The sizes of a stage, by the shapes of its weights; None where its parts are not known."""
    try:
        layers, end = parts_of(block).layers, consumer_parts(consumer)
    except NoPartsError:
        return None
    convs = [conv for layer in layers for conv in layer.convolutions]
    # A parametrized weight is none of these: to read it would compute it.
    weights: list[Any] = [conv._parameters.get("weight") for conv in convs]
    if end is not None and end.conv is not None:
        weights.append(end.conv._parameters.get("weight"))
    known = all(isinstance(each, Tensor) and not is_lazy(each) and each.dim() > 2 for each in weights)
    if end is None or not layers or not known:
        return None
    shapes = [each.shape for each in weights]
    inside = [(each.keep_bottleneck, *each.conv1.weight.shape[:2]) for each in layers if each.norm2 is not None]
    return StageSizes(
        channels=layers[-1].conv1.weight.shape[1] + layers[-1].last_conv.weight.shape[0],
        weights=tuple(shapes[: len(convs)]),
        consumer_weight=None if end.conv is None else shapes[-1],
        pools=end.pools or end.max_pools,
        saved=sum(width for keeps, width, _ in inside if keeps),
        layers=tuple((channels, width) for keeps, width, channels in inside if keeps is None),
        trains=not uses_running_statistics(layers[0].norm1),
    )


@lru_cache(maxsize=256)
def num_saved(stages: tuple[StageSizes, ...], shape: tuple[int, ...], itemsize: int) -> Sequence[int] | None:
    """For each stage how many of its layers, the last ones, save their bottlenecks; None where plain modules hold less.

    The stages are all of a network; `shape` is (N, *spatial) of the first block's input, whose values have `itemsize`
    bytes. All sums below are numbers of values.
    """
    held, spare, all_pixels, peak, shared, saved, scratch_of_plain = 0, [], [], 0, 0, 0, 0
    images, *sides = shape
    accumulated = max(4, itemsize) / itemsize  # gradients of weights are sums in float32 or float64
    all_weights = 0
    for stage in stages:
        pixels, width = images * math.prod(sides), max((width for _, width in stage.layers), default=0)
        sides = [side // (1 + stage.pools) for side in sides]
        last, largest = stage.consumer_weight, max(map(math.prod, stage.weights))
        features = pixels * stage.channels
        output = images * math.prod(sides) * (stage.channels if last is None else last[0])
        weights = sum(map(math.prod, stage.weights)) + math.prod(last or [0])
        im2col = max(math.prod(shape[1:]) for shape in stage.weights)  # the most values for a pixel
        held += features + pixels * stage.saved
        # X, its gradient, two bottlenecks, the weights' gradients; one layer's packed weight, partial sums and tiles.
        packed = min(weights // 2, max(3 * largest, SMALL_SCRATCH // itemsize))
        gradients = (weights + packed) * accumulated
        tiles = min(im2col * min(pixels, TILE_PIXELS), SMALL_SCRATCH // 2 // itemsize)
        shared = max(shared, held + features + output + pixels * width * 2 + gradients + tiles)
        # Each convolution's input and its norm's, of plain.
        saved += 2 * (pixels * sum(shape[1] for shape in stage.weights) + features + output)
        # PyTorch convolves one image, and any number in float64, by im2col; in half precision grad_input is in float32.
        by_im2col = itemsize == 8 or (images == 1 and itemsize == 4)
        in_float32 = 2 * max(shape[1] for shape in stage.weights) if itemsize == 2 else 0
        scratch_of_plain = max(scratch_of_plain, largest + pixels * (im2col if by_im2col else in_float32))
        if not peak:  # X, its gradient, the output's gradient and 2¼ bottlenecks
            peak = held + features + output + pixels * width * 9 // 4
        scratch = pixels * width * 9 // 2 + 2 * output + 2 * weights * 4 // itemsize
        spare.append(peak - held - features - scratch)
        all_pixels.append(pixels)
        all_weights += weights
    if shared > saved + scratch_of_plain:
        return None
    counts, full = [0] * len(stages), {0}
    if not all(stage.trains for stage in stages):
        return counts
    layers = [(*layer, i) for i, stage in enumerate(stages) for layer in stage.layers]
    bottlenecks = sum(all_pixels[i] * width for _, width, i in layers)
    if bottlenecks * SMALL_PART <= all_weights * accumulated:
        spare, full = [bottlenecks] * len(stages), set[int]()
    for channels, width, i in sorted(layers, reverse=True):  # most multiplications for each value first
        size = all_pixels[i] * width
        if i in full or channels < SMALLEST_INPUT or min(spare[i:]) < size:
            full.add(i)
        else:
            counts[i] += 1
            spare[i:] = [each - size for each in spare[i:]]
    return counts
