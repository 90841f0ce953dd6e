"""The stem on an NVIDIA GPU, between its convolutions, which are cuDNN's: batch norm → activation → max pooling.

z, the convolution's output, is read once for the statistics and once for the pooled output; in the backward once for
the maxima and the sums of the norm's gradients, and once, with the windows that contain each pixel, for z's gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ...._tensors import memory_format_of
from ... import stem as portable_stem
from ...argument_checks import checked
from ...interface import AffineInput, BatchNormAffine, Gradients, StatisticsOutput
from ...max_pooling import MaxPool
from ..device import stem_kernels
from .common import (
    MAX_PROGRAM_INSTANCES,
    activation_constants,
    cdiv,
    combine_statistics,
    divisibility,
    finish_backward,
    norm_vectors,
    num_splits,
    run,
)

_STATISTICS_TILE = {False: (512, 4), True: (256, 16)}
_TILE = {False: (128, 4), True: (16, 32)}
"""Rows and channels of a tile, by whether z is in channels_last memory. In NCHW, a tile's channels must divide z's."""


MAX_WINDOW = 25
"""The largest pooling window, in pixels: the kernels unroll it, and store positions in it as int8."""


def supports(shape: torch.Size, pool: MaxPool | None = None) -> bool:
    """Whether the kernels can run on images of `shape`: there is a pixel, and row numbers and offsets fit int32."""
    if len(shape) != 4 or shape.numel() < 1 or shape[2:].numel() * max(shape[:2]) >= 1 << 31:
        return False
    if pool is None:
        return True
    fits = math.prod(pool.kernel_size) <= MAX_WINDOW and max(pool.dilation) == 1
    return fits and min(pool.pooled_size(shape[2:])) >= 1


def images_at_once(x: Tensor, shape: torch.Size) -> int:
    return len(x) if supports(shape) else portable_stem.images_at_once(x, shape)


@checked
def image_statistics(values: Tensor, statistics: StatisticsOutput) -> None:
    if not supports(values.shape):
        return portable_stem.image_statistics(values, statistics)
    constants = _constants(values, _STATISTICS_TILE)
    channels, height, width = values.shape[1:]
    num_rows, block_rows = len(values) * height * width, constants["BLOCK_ROWS"]
    grid = _tiles(num_rows, channels, constants)
    stats = values.new_empty(grid[0], 2, channels, dtype=torch.float32)
    sizes = num_rows, channels, height, width
    run(stem_kernels.image_statistics, grid, sizes, constants, stats, values)
    return combine_statistics(stats, block_rows, num_rows, statistics)


@checked
def norm_activation_max_pool(input: AffineInput, pool: MaxPool, dtype: torch.dtype) -> Tensor:
    values, norm, activation = input
    if not supports(values.shape, pool):
        return portable_stem.norm_activation_max_pool(input, pool, dtype)
    output = _empty_pooled(values, pool, dtype)
    constants = _constants(values, _TILE) | _pool_constants(pool) | activation_constants(activation)
    num_rows, sizes = _rows(output), (*values.shape[1:], *pool.pooled_size(values.shape[2:]))
    grid, vectors = _tiles(num_rows, values.shape[1], constants), norm_vectors(norm)[0]
    kernel = stem_kernels.norm_activation_max_pool_forward
    run(kernel, grid, (num_rows, *sizes), constants, output, values, *vectors)
    return output


@checked
def norm_activation_max_pool_reduce(grad_output: Tensor, input: AffineInput, pool: MaxPool) -> tuple[Tensor, Gradients]:
    """The indices are the positions of the maxima within their windows."""
    values, norm, activation = input
    if not supports(values.shape, pool):
        return portable_stem.norm_activation_max_pool_reduce(grad_output, input, pool)
    indices = _empty_pooled(values, pool, torch.int8)
    constants = _constants(values, _TILE) | _pool_constants(pool) | activation_constants(activation)
    num_rows, channels = _rows(indices), values.shape[1]
    channel_tiles = cdiv(channels, constants["BLOCK_CHANNELS"])
    splits = num_splits(num_rows, constants["BLOCK_ROWS"], channel_tiles, MAX_PROGRAM_INSTANCES)
    partial_sums = values.new_empty(splits, 2, channels, dtype=torch.float32)
    tensors = indices, partial_sums, grad_output, values, *norm_vectors(norm)[0]
    sizes = *values.shape[1:], *pool.pooled_size(values.shape[2:])
    kernel, grid = stem_kernels.norm_activation_max_pool_backward_reduce, (channel_tiles, splits)
    run(kernel, grid, (num_rows, *sizes), constants, *tensors)
    of_centered = BatchNormAffine(norm.weight, norm.bias, norm.inv_std)  # the kernel subtracts the mean
    return indices, finish_backward(of_centered, None, partial_sums)


@checked
def norm_activation_max_pool_backward(
    grad_output: Tensor, indices: Tensor, input: AffineInput, pool: MaxPool, sums: Gradients, count: int
) -> None:
    values, norm, activation = input
    if not supports(values.shape, pool):
        return portable_stem.norm_activation_max_pool_backward(grad_output, indices, input, pool, sums, count)
    constants = _constants(values, _TILE) | _pool_constants(pool) | activation_constants(activation)
    constants["FROZEN"] = norm.frozen
    constants["num_warps"] = 4 if constants["CHANNELS_LAST"] else 8  # a row has many pixels: half as many registers
    vectors = norm_vectors(norm)[0]
    # A row is a stride of pixels, of an image with the padding before it, but not after it.
    sides = zip(values.shape[2:], pool.padding, pool.stride, strict=True)
    num_rows = len(values) * math.prod(cdiv(size + padding, stride) for size, padding, stride in sides)
    grid, sizes = _tiles(num_rows, values.shape[1], constants), (*values.shape[1:], *pool.pooled_size(values.shape[2:]))
    grads = sums.norm_weight.contiguous(), sums.norm_bias.contiguous()
    tensors = values, indices, grad_output, values, *vectors, *grads
    kernel = stem_kernels.norm_activation_max_pool_backward
    return run(kernel, grid, (1 / count, num_rows, *sizes), constants, *tensors)


def _constants(values: Tensor, tiles: dict[bool, tuple[int, int]]) -> dict[str, Any]:
    channels_last, channels = memory_format_of(values) is torch.channels_last, values.shape[1]
    block_rows, block_channels = tiles[channels_last]
    if not channels_last:
        size, block_channels = block_rows * block_channels, math.gcd(block_channels, channels)
        block_rows = size // block_channels
    contiguous = channels if channels_last else values.shape[2] * values.shape[3]
    constants = {"CHANNELS_LAST": channels_last, "DIVISIBILITY": divisibility(values.dtype, contiguous)}
    return constants | {"BLOCK_ROWS": block_rows, "BLOCK_CHANNELS": block_channels}


def _pool_constants(pool: MaxPool) -> dict[str, int]:
    names = ("KERNEL", pool.kernel_size), ("STRIDE", pool.stride), ("PADDING", pool.padding)
    return {f"{name}_{axis}": size for name, sizes in names for axis, size in zip("YX", sizes, strict=True)}


def _tiles(num_rows: int, channels: int, constants: dict[str, Any]) -> tuple[int, int]:
    """Tiles of rows and of channels."""
    return cdiv(num_rows, constants["BLOCK_ROWS"]), cdiv(channels, constants["BLOCK_CHANNELS"])


def _rows(images: Tensor) -> int:
    return images.numel() // images.shape[1]


def _empty_pooled(values: Tensor, pool: MaxPool, dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor of the pooled images, in the memory format of `values`."""
    shape = *values.shape[:2], *pool.pooled_size(values.shape[2:])
    return torch.empty(shape, dtype=dtype, device=values.device, memory_format=memory_format_of(values))
