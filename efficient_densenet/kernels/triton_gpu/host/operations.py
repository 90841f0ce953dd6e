"""The shared engine's kernels on an NVIDIA GPU: the operations of `portable`, in fewer passes over memory, in Triton.

cuDNN computes the 1×1 convolution after pooling, and the 3×3 convolutions that `conv3x3.is_for_triton` refuses, on an
activation that a Triton kernel writes. float32 is multiplied exactly or in TF32, as PyTorch's setting for convolutions
says. No kernel is a custom operator: kernels run inside the operators of a stage, which torch.compile does not trace
into. Nothing synchronizes with the device, and every reduction has a fixed order.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...._dimensions import DIMENSIONS
from ... import convolution, portable, row_tiles
from ...activations import IDENTITY
from ...argument_checks import checked
from ...interface import (
    AffineInput,
    BatchNormBackward,
    Conv1x1,
    GradAccumulator,
    Gradients,
    ImageConv,
    StatisticsOutput,
)
from ...portable import to_pixel_matrix, to_spatial
from ..device import kernels, statistics_kernels
from . import conv1x1, conv3x3
from .common import (
    MAX_PROGRAM_INSTANCES,
    cdiv,
    combine_statistics,
    divisibility,
    finish_backward,
    input_arguments,
    num_splits,
    run,
    with_contiguous_rows,
)
from .stem import (  # noqa: F401 (the stem's operations in this set)
    image_statistics,
    images_at_once,
    norm_activation_max_pool,
    norm_activation_max_pool_backward,
    norm_activation_max_pool_reduce,
)

SECTOR_BYTES = 32
"""The smallest read of a GPU. In-place updates of a slice of channels are efficient if its rows fill whole sectors."""

_TILE = {"BLOCK_ROWS": 64, "BLOCK_CHANNELS": 32}
_UNALIGNED_POOLED_TILE = {"BLOCK_ROWS": 32, "BLOCK_CHANNELS": 32}
"""The tile of a backward through pooling. With 64 rows whose channels are loaded one by one, addresses are spilled."""

_NARROW_TILE = {"BLOCK_ROWS": 128, "BLOCK_CHANNELS": 16}


@checked
def batch_statistics(values: Tensor, statistics: StatisticsOutput) -> None:
    values = with_contiguous_rows(values)
    num_rows, channels = values.shape
    block_rows, block_channels = _NARROW_TILE["BLOCK_ROWS"], _NARROW_TILE["BLOCK_CHANNELS"]
    grid, sizes = (cdiv(num_rows, block_rows), cdiv(channels, block_channels)), (channels, values.stride(0))
    stats = values.new_empty(grid[0], 2, channels, dtype=torch.float32)
    constants = {"DIVISIBILITY": divisibility(values.dtype, *sizes), **_NARROW_TILE}
    run(statistics_kernels.tile_statistics, grid, (num_rows, *sizes), constants, stats, values)
    combine_statistics(stats, block_rows, num_rows, statistics)


@checked
def center(values: Tensor, mean: Tensor, output: Tensor) -> None:
    values = with_contiguous_rows(values)
    num_rows, channels = values.shape
    block_rows, block_channels = _NARROW_TILE["BLOCK_ROWS"], _NARROW_TILE["BLOCK_CHANNELS"]
    grid, sizes = (cdiv(num_rows, block_rows), cdiv(channels, block_channels)), (output.stride(0), values.stride(0))
    constants = {"DIVISIBILITY": divisibility(values.dtype, channels, *sizes), **_NARROW_TILE}
    run(statistics_kernels.center, grid, (num_rows, channels, *sizes), constants, output, values, mean.contiguous())


@checked
def batch_norm_grad_input(
    grad: BatchNormBackward, may_overwrite: bool = False, previous: Tensor | None = None
) -> Tensor:
    if grad.sums is None or grad.inv_std is None:
        return grad.grad_accum.contiguous()
    values, grad_accum = with_contiguous_rows(grad.values), with_contiguous_rows(grad.grad_accum)
    num_rows, channels = values.shape
    has_sectors = grad_accum.is_contiguous() or channels * grad_accum.itemsize % SECTOR_BYTES == 0
    in_place = may_overwrite and has_sectors  # else other columns' sectors would be read and written, too
    grad_input = grad_accum if in_place else previous
    if grad_input is None:
        grad_input = torch.empty_like(values, memory_format=torch.contiguous_format)
    inv_std = grad.inv_std.contiguous()
    mean = inv_std if grad.mean is None else grad.mean.contiguous()
    tensors = grad_input, grad_accum, values, mean, inv_std, grad.sums
    sizes = channels, grad_input.stride(0), grad_accum.stride(0), values.stride(0)
    constants = {"HAS_MEAN": grad.mean is not None, "DIVISIBILITY": divisibility(values.dtype, *sizes), **_NARROW_TILE}
    numbers = 1 / grad.count, num_rows, *sizes, grad.sums.stride(0)
    run(kernels.batch_norm_grad_input, _grid(num_rows, channels, _NARROW_TILE), numbers, constants, *tensors)
    return grad_input


@checked
def affine_forward(input: AffineInput) -> Tensor:
    input = input._replace(activation=IDENTITY)
    return _affine_activation_pool(input, input.values.dtype, torch.Size([len(input.values), 1, 1]))


@checked
def affine_backward(grad_output: Tensor, input: AffineInput, accumulator: GradAccumulator) -> Gradients:
    input, shape = input._replace(activation=IDENTITY), torch.Size([len(input.values), 1, 1])
    partial_sums = _affine_activation_pool_backward(grad_output, input, accumulator, shape)
    return finish_backward(input.norm, accumulator.sums, partial_sums)


@checked
def conv1x1_forward(conv: Conv1x1, statistics: StatisticsOutput | None = None) -> None:
    if not conv1x1.is_for_triton(conv.weight):
        return portable.conv1x1_forward(conv, statistics)
    return conv1x1.forward(conv, statistics)


@checked
def conv1x1_backward(
    grad_output: BatchNormBackward,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    next_bottleneck: Conv1x1 | None = None,
) -> Gradients:
    if not conv1x1.is_for_triton(weight):
        return portable.conv1x1_backward(grad_output, input, weight, accumulator, next_bottleneck)
    return conv1x1.backward(grad_output, input, weight, accumulator, next_bottleneck)


def arranged_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    return conv3x3.channels_last(weights)


@checked
def conv3x3_forward(conv: ImageConv, statistics: StatisticsOutput | None = None) -> Tensor:
    if conv3x3.is_for_triton(*conv[1:]):
        return conv3x3.forward(conv, statistics)
    output = _cudnn_conv(conv, pool=1)
    if statistics is not None:
        batch_statistics(output, statistics)
    return output


@checked
def conv3x3_backward(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> Gradients:
    if conv3x3.is_for_triton(*conv[1:]):
        return conv3x3.backward(grad_output, conv, accumulator)
    return _cudnn_conv_backward(grad_output, conv, accumulator, pool=1)


@checked
def pooled_conv1x1_forward(conv: ImageConv) -> Tensor:
    if len(conv.shape) != 3:
        return portable.pooled_conv1x1_forward(conv)
    return _cudnn_conv(conv._replace(weight=conv.weight[:, :, None, None]), pool=2)


@checked
def pooled_conv1x1_backward(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> Gradients:
    if len(conv.shape) != 3:
        return portable.pooled_conv1x1_backward(grad_output, conv, accumulator)
    of_images = conv._replace(weight=conv.weight[:, :, None, None])
    grads = _cudnn_conv_backward(grad_output, of_images, accumulator, pool=2)
    return grads if grads.conv_weight is None else grads._replace(conv_weight=grads.conv_weight.flatten(1))


def _cudnn_conv(conv: ImageConv, pool: int) -> Tensor:
    """The convolution of the activation, or of its average over pool × pool pixels: (pixels, out_channels)."""
    input, weight, shape, dilation = conv
    function = DIMENSIONS[len(shape) - 1].conv
    padding = weight.shape[-1] // 2 * dilation
    num_pixels = math.prod((shape[0], *(size // pool for size in shape[1:])))
    output = weight.new_empty(0, len(weight))
    for _, tile, activation in _activation_tiles(input, weight.dtype, shape, pool):
        part = to_pixel_matrix(function(activation, weight, padding=padding, dilation=dilation))
        if len(part) == num_pixels:
            return part
        if not len(output):  # of all pixels, also where a prediction of memory leaves tiles out
            output = part.new_empty(num_pixels, len(weight))
        output[tile] = part
    return output


def _cudnn_conv_backward(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator, pool: int) -> Gradients:
    input, weight, shape, dilation = conv
    grad_weight, partial_sums = None, []
    for tile, output_tile, activation in _activation_tiles(input, weight.dtype, shape, pool):
        output_shape = torch.Size([len(activation), *activation.shape[2:]])
        grad_output_tile = to_spatial(grad_output[output_tile], output_shape)
        grad, grad_weight_tile = convolution.gradients(
            grad_output_tile, activation, weight, dilation, accumulator.needs_grad_weight
        )
        if grad_weight is not None and grad_weight_tile is not None:
            grad_weight.add_(grad_weight_tile)
        elif grad_weight_tile is not None:  # in cuDNN's own layout, channels_last
            grad_weight = grad_weight_tile.float().contiguous()
        tile_shape = torch.Size([len(activation), *shape[1:]])
        partial_sums.append(
            _affine_activation_pool_backward(
                to_pixel_matrix(grad), input.tile(tile), accumulator.tile(tile), tile_shape, pool
            )
        )
    all_sums = partial_sums[0] if len(partial_sums) == 1 else torch.cat(partial_sums)
    return finish_backward(input.norm, accumulator.sums, all_sums)._replace(conv_weight=grad_weight)


def _activation_tiles(
    input: AffineInput, dtype: torch.dtype, shape: torch.Size, pool: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """The tiles of as many whole images as fit in scratch. Each is its rows of `input`, its rows of the pooled images,
    and the activation, (images, channels, *pooled sizes)."""
    num_images, *sizes = shape
    pooled_sizes = [size // pool for size in sizes]
    pixels, pooled_pixels = math.prod(sizes), math.prod(pooled_sizes)
    image_bytes = pooled_pixels * input.values.shape[1] * dtype.itemsize
    tile_images = max(1, row_tiles.TILE_BYTES["cuda"] // max(1, image_bytes))
    for images in row_tiles.slices(num_images, tile_images, input.values):
        start, stop = images.start, images.stop
        tile, count = slice(start * pixels, stop * pixels), stop - start
        activation = _affine_activation_pool(input.tile(tile), dtype, torch.Size([count, *sizes]), pool)
        output_tile = slice(start * pooled_pixels, stop * pooled_pixels)
        yield tile, output_tile, to_spatial(activation, torch.Size([count, *pooled_sizes]))


def _affine_activation_pool(input: AffineInput, dtype: torch.dtype, shape: torch.Size, pool: int = 1) -> Tensor:
    """average_pool(f(scale · values + shift)) in `dtype`, (pooled pixels, channels)."""
    values, vectors, constants = input_arguments(input)
    num_images, height, width = _as_images(shape)
    num_rows, channels = num_images * (height // pool) * (width // pool), values.shape[1]
    output = values.new_empty(num_rows, channels, dtype=dtype)
    sizes = channels, values.stride(0), height, width
    constants |= {"POOL": pool, "DIVISIBILITY": divisibility(values.dtype, *sizes[:2]), **_TILE}
    grid, tensors = _grid(num_rows, channels, _TILE), (output, values, *vectors)
    run(kernels.affine_activation_pool_forward, grid, (num_rows, *sizes), constants, *tensors)
    return output


def _affine_activation_pool_backward(
    grad_output: Tensor,
    input: AffineInput,
    accumulator: GradAccumulator,
    shape: torch.Size,
    pool: int = 1,
) -> Tensor:
    """Accumulates the gradient g of the affine map; returns the partial sums, (splits, 2, channels)."""
    values, vectors, constants = input_arguments(input)
    grad_accum, overwrite = accumulator.grad_accum, accumulator.overwrite
    if overwrite and any(size % pool for size in shape[1:]):
        grad_accum.zero_()  # pixels at the edge of an odd size are in no window: the kernel does not write them
    num_rows, channels = grad_output.shape
    strides = grad_accum.stride(0), values.stride(0)
    alignment = divisibility(values.dtype, channels, *strides)
    tile = _UNALIGNED_POOLED_TILE if pool > 1 and alignment == 1 else _TILE
    grid = _grid(num_rows, channels, tile)
    partial_sums = values.new_empty(grid[1], 2, channels, dtype=torch.float32)
    tensors = partial_sums, grad_accum, grad_output.contiguous(), values, *vectors
    _, height, width = _as_images(shape)
    constants |= {"FROZEN": input.norm.frozen, "POOL": pool, "OVERWRITE": overwrite, "DIVISIBILITY": alignment, **tile}
    sizes = num_rows, channels, *strides, height, width
    run(kernels.affine_activation_pool_backward, grid, sizes, constants, *tensors)
    return partial_sums


def _as_images(shape: torch.Size) -> tuple[int, int, int]:
    """(images, height, width). Signals and volumes are not pooled here, so all their pixels may form one column."""
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (shape[0], math.prod(shape[1:]), 1)


def _grid(num_rows: int, channels: int, blocks: dict[str, int]) -> tuple[int, int]:
    """The number of tiles of channels, and of splits, the program instances that share the tiles of rows."""
    channel_tiles = cdiv(channels, blocks["BLOCK_CHANNELS"])
    return channel_tiles, num_splits(num_rows, blocks["BLOCK_ROWS"], channel_tiles, MAX_PROGRAM_INSTANCES)
