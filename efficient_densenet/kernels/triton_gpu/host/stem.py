"""The stem on an NVIDIA GPU, between its convolutions, which are cuDNN's: batch norm → ReLU → max pooling.

z, the convolution's output, is read once for the statistics and once for the pooled output; in the backward once for
the maxima and the sums of the norm's gradients, and once, with the windows that each pixel is in, for z's own gradient.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...._tensors import memory_format_of
from ...interface import BatchNormAffine, Gradients, StatisticsOutput
from ..device import stem_kernels
from . import launch
from .common import cdiv, combine_statistics, divisibility, finish_backward, norm_vectors, num_splits
from .operations import MAX_PROGRAM_INSTANCES

_STATISTICS_TILE = {False: (512, 4), True: (256, 16)}
_TILE = {False: (128, 4), True: (16, 32)}
"""Rows and channels of a tile, by whether z is in channels_last memory. In NCHW as many channels as divide z's."""


class Pooling(NamedTuple):
    """A max pooling of images without dilation: its settings for height and width, and the size that it makes."""

    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    pooled_size: Sequence[int]

    @property
    def constants(self) -> dict[str, int]:
        names = ("KERNEL", self.kernel_size), ("STRIDE", self.stride), ("PADDING", self.padding)
        return {f"{name}_{axis}": size for name, sizes in names for axis, size in zip("YX", sizes, strict=True)}


def batch_statistics(values: Tensor, statistics: StatisticsOutput) -> None:
    """Write the statistics of each channel of images."""
    constants = _constants(values, _STATISTICS_TILE)
    channels, height, width = values.shape[1:]
    num_rows, block_rows = len(values) * height * width, constants["BLOCK_ROWS"]
    grid = _tiles(num_rows, channels, constants)
    stats = values.new_empty(grid[0], 2, channels, dtype=torch.float32)
    launch.launch(stem_kernels.image_statistics, grid, stats, values, num_rows, channels, height, width, **constants)
    combine_statistics(stats, block_rows, num_rows, statistics)


def norm_relu_max_pool(values: Tensor, norm: BatchNormAffine, pool: Pooling, dtype: torch.dtype) -> Tensor:
    """max_pool(relu(norm(values))) in `dtype` and the memory format of `values`."""
    output = _empty_pooled(values, pool, dtype)
    constants = _constants(values, _TILE) | pool.constants
    num_rows, sizes = _rows(output), (*values.shape[1:], *pool.pooled_size)
    grid, (vectors, _) = _tiles(num_rows, values.shape[1], constants), norm_vectors(norm)
    kernel = stem_kernels.norm_relu_max_pool_forward
    launch.launch(kernel, grid, output, values, *vectors, num_rows, *sizes, **constants)
    return output


def norm_gradients(
    grad_output: Tensor, values: Tensor, norm: BatchNormAffine, pool: Pooling
) -> tuple[Tensor, Gradients]:
    """The place of each maximum within its window, −1 where the ReLU is inactive, and the norm's gradients.

    `grad_output` is in the memory format of `values`.
    """
    indices = _empty_pooled(values, pool, torch.int8)
    constants = _constants(values, _TILE) | pool.constants
    num_rows, channels = _rows(indices), values.shape[1]
    channel_tiles = cdiv(channels, constants["BLOCK_CHANNELS"])
    splits = num_splits(num_rows, constants["BLOCK_ROWS"], channel_tiles, MAX_PROGRAM_INSTANCES)
    partial_sums = values.new_empty(splits, 2, channels, dtype=torch.float32)
    tensors = indices, partial_sums, grad_output, values, *norm_vectors(norm)[0]
    sizes = *values.shape[1:], *pool.pooled_size
    kernel, grid = stem_kernels.norm_relu_max_pool_backward_reduce, (channel_tiles, splits)
    launch.launch(kernel, grid, *tensors, num_rows, *sizes, **constants)
    of_centered = BatchNormAffine(norm.weight, norm.bias, norm.inv_std)  # the kernel subtracts the mean
    return indices, finish_backward(of_centered, None, partial_sums)


def write_grad_input(
    grad_output: Tensor,
    indices: Tensor,
    values: Tensor,
    norm: BatchNormAffine,
    pool: Pooling,
    sums: tuple[Tensor, Tensor, float] | None,
) -> None:
    """Write the gradient of `values` over them.

    `sums` are the norm's grad_weight and grad_bias, summed over all processes, and 1 / count; None for a frozen norm.
    """
    constants = _constants(values, _TILE) | pool.constants | {"FROZEN": sums is None}
    constants["num_warps"] = 4 if constants["CHANNELS_LAST"] else 8  # a row has many pixels: half as many registers
    (weight, _, mean, inv_std), _ = norm_vectors(norm)
    sum_grad_weight, sum_grad_bias, per_value = sums or (inv_std, inv_std, 0.0)
    num_rows = len(values) * math.prod(map(_cells, values.shape[2:], pool.padding, pool.stride))
    grid, sizes = _tiles(num_rows, values.shape[1], constants), (*values.shape[1:], *pool.pooled_size)
    tensors = values, indices, grad_output, values, weight, mean, inv_std, sum_grad_weight, sum_grad_bias
    kernel = stem_kernels.norm_relu_max_pool_backward
    launch.launch(kernel, grid, *tensors, per_value, num_rows, *sizes, **constants)


def _constants(values: Tensor, tiles: dict[bool, tuple[int, int]]) -> dict[str, Any]:
    channels_last, channels = memory_format_of(values) is torch.channels_last, values.shape[1]
    block_rows, block_channels = tiles[channels_last]
    if not channels_last:
        size, block_channels = block_rows * block_channels, math.gcd(block_channels, channels)
        block_rows = size // block_channels
    contiguous = channels if channels_last else values.shape[2] * values.shape[3]
    constants = {"CHANNELS_LAST": channels_last, "DIVISIBILITY": divisibility(values.dtype, contiguous)}
    return constants | {"BLOCK_ROWS": block_rows, "BLOCK_CHANNELS": block_channels}


def _tiles(num_rows: int, channels: int, constants: dict[str, Any]) -> tuple[int, int]:
    """Tiles of rows and of channels."""
    return cdiv(num_rows, constants["BLOCK_ROWS"]), cdiv(channels, constants["BLOCK_CHANNELS"])


def _cells(size: int, padding: int, stride: int) -> int:
    """How many strides the padded side has, without the padding at its end."""
    return cdiv(size + padding, stride)


def _rows(images: Tensor) -> int:
    return images.numel() // images.shape[1]


def _empty_pooled(values: Tensor, pool: Pooling, dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor of the pooled images, in the memory format of `values`."""
    shape = *values.shape[:2], *pool.pooled_size
    return torch.empty(shape, dtype=dtype, device=values.device, memory_format=memory_format_of(values))
