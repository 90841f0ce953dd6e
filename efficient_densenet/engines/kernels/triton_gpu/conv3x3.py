"""The 3×3 convolutions of the Triton set in two dimensions: which of them are Triton's, and launches of its kernels.

Sizes: a forward reads the values once (its other two loads of them hit caches) and writes the output; a backward reads
the values and grad_output twice and writes grad_accum. On cuDNN's path the activation and its gradient, each as large
as the values, are written and read besides.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..interface import AffineInput, GradAccumulator
from . import conv3x3_kernels
from .arguments import cdiv, divisibility, launch, norm_vectors, precision, with_contiguous_rows

MAX_OUT_CHANNELS = 64
"""Of a wider convolution the products take longer than the bytes, and cuDNN is better at products."""

MAX_EXACT_OUT_CHANNELS = 16
"""The same for float32 that is multiplied exactly, which tensor cores cannot."""

MAX_PIXELS = 2**30
"""Rows, and rows shifted by a tap, are int32."""

HAS_GATHER = hasattr(tl, "gather")
"""Whether the forward may shift sums within a tile: since Triton 3.3."""

MAX_OVERLAP = 1 / 8
"""The largest part of a forward's tile by which it may overlap the next one."""


class Partials(NamedTuple):
    """A backward's sums over the rows, of each split of them: to be added up in this order."""

    sums: Tensor  # (splits, 2, channels): Σ g and Σ g · values
    grad_weight: Tensor | None  # (splits, out_channels, 9 taps, channels)


def is_for_triton(in_channels: int, out_channels: int, shape: torch.Size, dtype: torch.dtype, dilation: int) -> bool:
    """Whether Triton's kernels take a 3×3 convolution of images of `shape`, (images, *spatial), rather than cuDNN.

    The bytes decide for those of a DenseNet: Triton's kernels move a third of what cuDNN's path moves. Not so for many
    output channels, where products decide; and no more, for exact products, for more than a few. They take any number
    of in_channels, and any dilation whose shifted rows are int32, but only images of two dimensions.
    """
    is_exact = dtype == torch.float32 and precision() == "ieee"
    if len(shape) != 3 or out_channels > (MAX_EXACT_OUT_CHANNELS if is_exact else MAX_OUT_CHANNELS):
        return False
    return in_channels > 0 and 0 < shape.numel() <= MAX_PIXELS and dilation * (shape[2] + 1) <= MAX_PIXELS


def forward(
    input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1, with_statistics: bool = False
) -> tuple[Tensor, Tensor, int]:
    """The output; and, with statistics, those of each tile of rows, (tiles, 2, out_channels), and the rows of a tile."""
    values, weight = with_contiguous_rows(input.values), _channels_last(weight)
    (num_rows, channels), out_channels = values.shape, len(weight)
    tile = forward_tile(out_channels, weight.dtype)
    block_rows = tile["BLOCK_ROWS"]
    shift_sums = HAS_GATHER and 2 * dilation <= MAX_OVERLAP * block_rows
    tile_rows = block_rows - 2 * dilation * shift_sums
    row_tiles = cdiv(num_rows, tile_rows)
    output = weight.new_empty(num_rows, out_channels)
    stats = weight.new_empty(row_tiles if with_statistics else 0, 2, out_channels, dtype=torch.float32)
    norm, has_mean = norm_vectors(input.norm)
    sizes = num_rows, channels, *shape[1:], dilation, values.stride(0), output.stride(0)
    constants = {"OUT_CHANNELS": out_channels, "HAS_MEAN": has_mean, "WITH_STATISTICS": with_statistics}
    constants |= {"SHIFT_SUMS": shift_sums, "PRECISION": precision()}
    constants |= {"DIVISIBILITY": divisibility(channels, values.stride(0)), "OUT_DIVISIBILITY": divisibility(out_channels)}
    grid = cdiv(out_channels, tile["BLOCK_OUT"]), row_tiles
    tensors = output, stats, values, *norm, weight
    launch(conv3x3_kernels.conv3x3_forward, grid, *tensors, *sizes, **constants, **tile)
    return output, stats, tile_rows


def backward(
    grad_output: Tensor,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    shape: torch.Size,
    dilation: int = 1,
) -> Partials:
    """Accumulates the gradient g of the values; returns what remains to be added up."""
    grad_output = with_contiguous_rows(grad_output.to(weight.dtype))
    partial_sums = _grad_input(grad_output, input, weight, accumulator, shape, dilation)
    if not accumulator.needs_grad_weight:
        return Partials(partial_sums, None)
    return Partials(partial_sums, _grad_weight(grad_output, input, shape, dilation))


def _grad_input(
    grad_output: Tensor,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    shape: torch.Size,
    dilation: int,
) -> Tensor:
    values, weight, grad_accum = with_contiguous_rows(input.values), _channels_last(weight), accumulator.grad_accum
    (num_rows, channels), out_channels = values.shape, len(weight)
    tile = grad_input_tile(out_channels, weight.dtype)
    channel_tiles = cdiv(channels, tile["BLOCK_CHANNELS"])
    splits = num_splits(num_rows, tile["BLOCK_ROWS"], channel_tiles, 8 * _multiprocessors(values.device))
    partial_sums = values.new_empty(splits, 2, channels, dtype=torch.float32)
    norm, has_mean = norm_vectors(input.norm)
    strides = grad_accum.stride(0), grad_output.stride(0), values.stride(0)
    constants = {"OUT_CHANNELS": out_channels, "HAS_MEAN": has_mean, "FROZEN": accumulator.frozen}
    constants |= {"OVERWRITE": accumulator.overwrite, "DIVISIBILITY": divisibility(channels, *strides[::2])}
    constants |= {"OUT_DIVISIBILITY": divisibility(grad_output.stride(0)), "PRECISION": precision()}
    tensors = partial_sums, grad_accum, grad_output, values, *norm, weight
    sizes = num_rows, channels, *shape[1:], dilation, *strides
    launch(conv3x3_kernels.conv3x3_grad_input, (channel_tiles, splits), *tensors, *sizes, **constants, **tile)
    return partial_sums


def _grad_weight(grad_output: Tensor, input: AffineInput, shape: torch.Size, dilation: int) -> Tensor:
    values = with_contiguous_rows(input.values)
    (num_rows, channels), out_channels = values.shape, grad_output.shape[1]
    tile = grad_weight_tile(grad_output.dtype, precision())
    tiles = cdiv(9 * out_channels, tile["BLOCK_COLUMNS"]), cdiv(channels, tile["BLOCK_CHANNELS"])
    # A partial gradient of the weight is as large as the values of a few hundred rows: splits are few.
    programs = 2 * _multiprocessors(values.device)
    splits = num_splits(num_rows, tile["BLOCK_ROWS"], math.prod(tiles), programs, min_tiles=8)
    partial_grad_weight = values.new_empty(splits, out_channels, 9, channels, dtype=torch.float32)
    norm, has_mean = norm_vectors(input.norm)
    strides = grad_output.stride(0), values.stride(0)
    constants = {"OUT_CHANNELS": out_channels, "HAS_MEAN": has_mean}
    constants |= {"DIVISIBILITY": divisibility(channels, strides[1]), "OUT_DIVISIBILITY": divisibility(strides[0])}
    tensors = partial_grad_weight, grad_output, values, *norm
    sizes = num_rows, channels, *shape[1:], dilation, *strides
    kernel, constants["PRECISION"] = conv3x3_kernels.conv3x3_grad_weight, precision()
    launch(kernel, (*tiles, splits), *tensors, *sizes, **constants, **tile)
    return partial_grad_weight


# Tiles for which no kernel spills or takes more than 128 registers a thread on the architectures 80 to 120, so that
# sixteen warps of a multiprocessor are resident, a quarter of an A100's or H200's; shared memory is at most 32 KiB a
# block. Loads are not pipelined (num_stages): they would bypass the L1 cache, in which the three loads of a pixel and
# the weights are found, and resident blocks have 8 to 20 KiB of loads in flight as it is.


def forward_tile(out_channels: int, dtype: torch.dtype) -> dict[str, int]:
    """The tile of `conv3x3_forward`."""
    if dtype != torch.float32 and out_channels > 16:
        return {"BLOCK_ROWS": 128, "BLOCK_CHANNELS": 32, "BLOCK_OUT": 32, "num_warps": 8, "num_stages": 1}
    block_out = 16 if out_channels <= 16 else 32
    return {"BLOCK_ROWS": 64, "BLOCK_CHANNELS": 16, "BLOCK_OUT": block_out, "num_warps": 4, "num_stages": 1}


def grad_input_tile(out_channels: int, dtype: torch.dtype) -> dict[str, int]:
    """The tile of `conv3x3_grad_input`."""
    is_narrow, is_float32 = out_channels <= 16, dtype == torch.float32
    blocks = {"BLOCK_ROWS": 64, "BLOCK_CHANNELS": 32, "BLOCK_OUT": 16 if is_narrow or is_float32 else 32}
    return {**blocks, "num_warps": 4, "num_stages": 1}


def grad_weight_tile(dtype: torch.dtype, precision: str) -> dict[str, int]:
    """The tile of `conv3x3_grad_weight`."""
    is_exact = dtype == torch.float32 and precision == "ieee"
    blocks = {"BLOCK_ROWS": 32, "BLOCK_CHANNELS": 32 if is_exact else 64, "BLOCK_COLUMNS": 128}
    return {**blocks, "num_warps": 8, "num_stages": 1}


def num_splits(num_rows: int, block_rows: int, other_tiles: int, programs: int, min_tiles: int = 1) -> int:
    """Among how many program instances the tiles of rows are divided: about `programs` in all, `min_tiles` for each."""
    row_tiles = cdiv(num_rows, block_rows)
    return max(1, min(cdiv(row_tiles, min_tiles), programs // other_tiles))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """How many a GPU has; for Triton's interpreter few, so that programs loop."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _channels_last(weight: Tensor) -> Tensor:
    """(out_channels, channels, 3, 3) that lies in memory as [out_channels, 3, 3, channels]."""
    return weight.contiguous(memory_format=torch.channels_last)
