"""The 3×3 convolutions of the Triton set: which of them run in Triton, and the launches of `conv3x3_kernels`.

A forward reads the values once from memory (two more loads hit caches) and writes the output. A backward reads the
values and grad_output twice and writes grad_accum. With cuDNN, the activation and its gradient, each as large as
the values, are also written and read.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from ...interface import GradAccumulator, Gradients, ImageConv, StatisticsOutput
from ..device import conv3x3_kernels
from .common import (
    cdiv,
    combine_statistics,
    divisibility,
    finish_backward,
    input_arguments,
    num_splits,
    product_precision,
    run,
    with_contiguous_rows,
)
from .tiles import KIB, DeviceLimits, Precision, device_limits

MAX_OUT_CHANNELS = 64
"""A wider convolution is limited by its products, not by memory traffic, and cuDNN's products are faster."""

MAX_EXACT_OUT_CHANNELS = 16
"""The limit for exact products, which tensor cores do not compute."""

MAX_PIXELS = 2**30
"""Row numbers, also shifted by a tap, must fit int32."""

MAX_DILATION = 4
"""The largest dilation: tiles of a forward, of 64 rows or more, overlap by it at both ends."""

HAS_GATHER = hasattr(tl, "gather")
"""Whether a forward can shift sums within a tile: since Triton 3.3."""


def is_for_triton(weight: Tensor, shape: torch.Size, dilation: int = 1) -> bool:
    """Whether Triton's kernels take a convolution of images of `shape`, (images, *spatial), rather than cuDNN.

    A DenseNet's convolutions are limited by memory traffic, and Triton's kernels move less than half of cuDNN's bytes,
    for any number of in_channels. With many output channels the products take longer; with exact products, 17 are many.
    The kernels support images of two dimensions only.
    """
    out_channels = weight.shape[0]
    if not HAS_GATHER or len(shape) != 3 or out_channels > MAX_OUT_CHANNELS or dilation > MAX_DILATION:
        return False
    if out_channels > MAX_EXACT_OUT_CHANNELS and product_precision(weight) is Precision.IEEE:
        return False
    return 0 < shape.numel() <= MAX_PIXELS and dilation * (shape[2] + 1) <= MAX_PIXELS


def forward(conv: ImageConv, statistics: StatisticsOutput | None = None) -> Tensor:
    """The output, (pixels, out_channels); writes its statistics, where they are requested."""
    shape, dilation, weight = conv.shape, conv.dilation, _channels_last(conv.weight)
    values, vectors, constants = input_arguments(conv.input)
    (num_rows, channels), out_channels = values.shape, weight.shape[0]
    products = product_precision(weight)
    tile = forward_tile(out_channels, products, num_rows, device_limits(values.device))
    tile_rows = tile["BLOCK_ROWS"] - 2 * dilation
    row_tiles = cdiv(num_rows, tile_rows)
    output = weight.new_empty(num_rows, out_channels)
    stats = weight.new_empty(row_tiles if statistics is not None else 0, 2, out_channels, dtype=torch.float32)
    sizes = num_rows, channels, *shape[1:], dilation, values.stride(0), out_channels
    constants |= {"OUT_CHANNELS": out_channels, "HAS_STATISTICS": statistics is not None}
    constants |= {"PRECISION": products.input_precision, **tile}
    constants["DIVISIBILITY"] = divisibility(values.dtype, channels, values.stride(0))
    constants["OUT_DIVISIBILITY"] = divisibility(output.dtype, out_channels)
    # CUDA takes at most 65,535 program instances on any axis but the first.
    grid = row_tiles, cdiv(out_channels, tile["BLOCK_OUT"])
    run(conv3x3_kernels.conv3x3_forward, grid, sizes, constants, output, stats, values, *vectors, weight)
    if statistics is not None:
        combine_statistics(stats, tile_rows, num_rows, statistics)
    return output


def backward(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> Gradients:
    """Accumulates the gradient of the input; returns the gradients of the parameters."""
    norm, weight = conv.input.norm, conv.weight
    grad_output = with_contiguous_rows(grad_output)
    partial_sums = _grad_input(grad_output, conv, accumulator)
    if not accumulator.needs_grad_weight:
        return finish_backward(norm, accumulator.sums, partial_sums)
    partial_grad_weight = _grad_weight(grad_output, conv)
    # Contiguous, whatever the memory format of the weight: the stage's operator promises that.
    grad_weight = weight.new_empty(weight.shape, dtype=torch.float32)
    return finish_backward(norm, accumulator.sums, partial_sums, grad_weight, partial_grad_weight, taps=9)


def _grad_input(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> Tensor:
    """Accumulates the gradient g of the values; returns the partial sums, (splits, 2, channels)."""
    input, weight, shape, dilation = conv
    (values, vectors, constants), weight = input_arguments(input), _channels_last(weight)
    grad_accum = accumulator.grad_accum
    (num_rows, channels), limits = values.shape, device_limits(values.device)
    tile = grad_input_tile(weight.shape[0], weight.dtype, limits.shared_memory)
    channel_tiles = cdiv(channels, tile["BLOCK_CHANNELS"])
    splits = num_splits(num_rows, tile["BLOCK_ROWS"], channel_tiles, 8 * limits.multiprocessors)
    partial_sums = values.new_empty(splits, 2, channels, dtype=torch.float32)
    strides = grad_accum.stride(0), grad_output.stride(0), values.stride(0)
    sizes = num_rows, channels, *shape[1:], dilation, *strides
    constants |= {"OUT_CHANNELS": weight.shape[0], "FROZEN": input.norm.frozen, "OVERWRITE": accumulator.overwrite}
    constants |= {"PRECISION": product_precision(weight).input_precision, **tile}
    constants["DIVISIBILITY"] = divisibility(values.dtype, channels, grad_accum.stride(0), values.stride(0))
    constants["OUT_DIVISIBILITY"] = divisibility(grad_output.dtype, grad_output.stride(0))
    tensors = partial_sums, grad_accum, grad_output, values, *vectors, weight
    run(conv3x3_kernels.conv3x3_grad_input, (channel_tiles, splits), sizes, constants, *tensors)
    return partial_sums


def _grad_weight(grad_output: Tensor, conv: ImageConv) -> Tensor:
    """The weight's gradient of each split of the rows, (splits, out_channels, 9, channels)."""
    (values, vectors, constants), out_channels = input_arguments(conv.input), grad_output.shape[1]
    (num_rows, channels), products = values.shape, product_precision(grad_output)
    tile = grad_weight_tile(out_channels, products)
    tiles = cdiv(9 * out_channels, tile["BLOCK_COLUMNS"]), cdiv(channels, tile["BLOCK_CHANNELS"])
    # A split's gradient is as large as a few hundred rows of values: use only as many splits as occupy the device.
    programs = 2 * device_limits(values.device).multiprocessors
    splits = num_splits(num_rows, tile["BLOCK_ROWS"], math.prod(tiles), programs, min_tiles=4)
    partial_grad_weight = values.new_empty(splits, out_channels, 9, channels, dtype=torch.float32)
    sizes = num_rows, channels, *conv.shape[1:], conv.dilation, grad_output.stride(0), values.stride(0)
    constants |= {"OUT_CHANNELS": out_channels, "PRECISION": products.input_precision, **tile}
    constants["DIVISIBILITY"] = divisibility(values.dtype, channels, values.stride(0))
    constants["OUT_DIVISIBILITY"] = divisibility(grad_output.dtype, grad_output.stride(0))
    tensors = partial_grad_weight, grad_output, values, *vectors
    run(conv3x3_kernels.conv3x3_grad_weight, (*tiles, splits), sizes, constants, *tensors)
    return partial_grad_weight


# Tiles for which the kernels, as compiled for the architectures 70 to 120, do not spill. A quarter of a
# multiprocessor's warps are resident, but for the forward's, which in TF32 are fast on an H100 nevertheless. Shared
# memory is at most 32 KiB a block. Loads are not pipelined (num_stages): they would bypass the L1 cache, in which
# weights and neighboring pixels are found, and resident blocks have 8 to 20 KiB of loads in flight anyway.


def forward_tile(out_channels: int, products: Precision, num_rows: int, limits: DeviceLimits) -> dict[str, int]:
    """The tile of `conv3x3_forward`. With 64 channels the loop over them is short, which takes the least time unless
    there are many rows for each multiprocessor."""
    block_out = 16 if out_channels <= 16 else 32
    has_many_rows = num_rows >= 256 * limits.multiprocessors
    if products is Precision.IEEE:
        block_rows, block_channels = 64, 16
    else:
        block_rows, block_channels = (128, 16) if has_many_rows and block_out == 16 else (64, 64)
    blocks = {"BLOCK_ROWS": block_rows, "BLOCK_CHANNELS": block_channels, "BLOCK_OUT": block_out}
    # By default, ptxas spills on 12.0 to fit a third block.
    options = {"maxnreg": 192} if products is Precision.HALF and block_out == 32 else {}
    return {**blocks, "num_warps": 4, "num_stages": 1, **options}


def grad_input_tile(out_channels: int, dtype: torch.dtype, shared_memory: int) -> dict[str, int]:
    """The tile of `conv3x3_grad_input` for the bytes of shared memory of a multiprocessor: graphics cards have
    fewer."""
    block_rows, options = 64, {"num_warps": 4, "num_stages": 1}
    if dtype == torch.float32 and out_channels > 16:
        block_rows, block_channels, block_out = 128, 32, 32
        options["num_warps"] = 8
    elif dtype == torch.float32:
        block_channels, block_out = 32, 16
        options["maxnreg"] = 128  # by default, ptxas spills on 8.6 and 8.9 to fit a fifth block
    elif out_channels <= 16:
        block_rows, block_channels, block_out = 128, 16, 16
    else:
        block_channels, block_out = 32 if shared_memory >= 128 * KIB else 16, 32
    return {"BLOCK_ROWS": block_rows, "BLOCK_CHANNELS": block_channels, "BLOCK_OUT": block_out, **options}


def grad_weight_tile(out_channels: int, products: Precision) -> dict[str, int]:
    """The tile of `conv3x3_grad_weight`. With incremental indices, ptxas spills for few channels on
    8.0 to 8.9."""
    block_channels = 32 if products is Precision.IEEE else 64
    blocks = {"BLOCK_ROWS": 32, "BLOCK_CHANNELS": block_channels, "BLOCK_COLUMNS": 128}
    incremental = products is Precision.HALF and out_channels > 16
    return {**blocks, "INCREMENTAL": incremental, "num_warps": 8, "num_stages": 1}


def channels_last(weights: Sequence[Tensor]) -> list[Tensor]:
    """The weights, those that the kernels may read in channels_last memory; two launches copy all of a shape."""
    arranged, by_shape = list(weights), defaultdict[torch.Size, list[int]](list)
    for i, weight in enumerate(weights):
        is_narrow = weight.dim() == 4 and weight.shape[0] <= MAX_OUT_CHANNELS
        if is_narrow and not weight.is_contiguous(memory_format=torch.channels_last):
            by_shape[weight.shape].append(i)
    for shape, places in by_shape.items():
        joined = weights[places[0]] if len(places) == 1 else torch.cat([weights[i] for i in places])
        copies = joined.contiguous(memory_format=torch.channels_last).split(shape[0])
        for i, weight in zip(places, copies, strict=True):
            arranged[i] = weight
    return arranged


def _channels_last(weight: Tensor) -> Tensor:
    """(out_channels, channels, 3, 3) in the memory layout [out_channels, 3, 3, channels]."""
    return weight.contiguous(memory_format=torch.channels_last)
