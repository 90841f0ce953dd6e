"""`portable`'s operations after a stem's convolution: batch norm, activation and max pooling of images.

A tile is as many images as fit `TILE_BYTES` in the accumulation dtype, at least one. Of an image that is too large, a
tile is as many channels as fit, at least one.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._tensors import CHANNELS_LAST, accumulation_dtype, device_type, memory_format_of
from .argument_checks import checked
from .interface import AffineInput, BatchNormAffine, BatchNormBackward, Gradients, StatisticsOutput
from .max_pooling import MaxPool
from .row_tiles import slices, tile_bytes_for

Tile = tuple[slice, slice]
"""A slice of the images, and a slice of their channels."""


def images_at_once(x: Tensor, shape: torch.Size) -> int:
    """The number of images that fit `TILE_BYTES`: a convolution's own workspace may be as large as its output."""
    return max(1, _channels_per_tile(x, shape) // shape[1])


@checked
def image_statistics(values: Tensor, statistics: StatisticsOutput) -> None:
    """The variance is computed in two passes, Σ (z − mean)² / count."""
    (mean, variance, inv_std), dims = statistics.rows, _reduced(values)
    mean.copy_(values.mean(dims, dtype=mean.dtype))
    variance.zero_()
    for tile in _tiles(values):
        centered = _centered(values, tile, mean, memory_format_of(values))
        variance[tile[1]] += centered.square_().sum(dims)
    variance.div_(values.numel() // values.shape[1])
    torch.add(variance, statistics.eps, out=inv_std).rsqrt_()


@checked
def norm_activation_max_pool(input: AffineInput, pool: MaxPool, dtype: torch.dtype) -> Tensor:
    output = None
    for tile in _tiles(input.values):
        maxima, _ = _pooled_tile(input, tile, pool)
        output = _empty_pooled(input.values, maxima, dtype) if output is None else output
        output[tile] = maxima
    assert output is not None  # there is a tile
    return output


@checked
def norm_activation_max_pool_reduce(grad_output: Tensor, input: AffineInput, pool: MaxPool) -> tuple[Tensor, Gradients]:
    """Σ g and Σ g · (z − mean) are summed over the maxima only."""
    values, norm, activation = input
    assert norm.mean is not None
    indices, memory_format, dims = None, memory_format_of(values), _reduced(values)
    grad_sum, product_sum = torch.zeros_like(norm.mean), torch.zeros_like(norm.mean)
    for tile in _tiles(values):
        pooled = _pooled_tile(input, tile, pool)
        maxima, tile_indices = (each.contiguous(memory_format=memory_format) for each in pooled)
        grad = grad_output[tile].to(norm.mean.dtype)
        at_maxima = values[tile].flatten(2).gather(2, tile_indices.flatten(2)).view_as(tile_indices)
        centered = at_maxima - _by_channel(norm.mean, tile, values)
        if activation.is_relu:
            inactive = maxima <= 0
            grad, tile_indices = grad.masked_fill(inactive, 0), tile_indices.masked_fill_(inactive, -1)
        else:
            grad = _grad_before_activation(grad, centered, input, tile)
        grad_sum[tile[1]] += grad.sum(dims)
        product_sum[tile[1]] += centered.mul_(grad).sum(dims)
        indices = _empty_pooled(values, maxima, torch.int32) if indices is None else indices
        indices[tile] = tile_indices
    assert indices is not None  # there is a tile
    return indices, Gradients(_of_centered(norm).grad_weight(grad_sum, product_sum), grad_sum)


@checked
def norm_activation_max_pool_backward(
    grad_output: Tensor, indices: Tensor, input: AffineInput, pool: MaxPool, sums: Gradients, count: int
) -> None:
    """grad_z = slope · (z − mean) + constant + scale · g, or scale · g under a frozen norm, with g = grad_output
    scattered to the maxima, times the activation's derivative."""
    values, norm, activation = input
    assert norm.mean is not None
    slope, constant = None, None
    if not norm.frozen:
        weighted = norm.grad_scale * torch.stack([sums.norm_bias, sums.norm_weight])
        backward = BatchNormBackward(values, values, norm.inv_std, None, weighted, count)
        slope, constant, _ = backward.coefficients()
    for tile in _tiles(values):
        centered, active = _centered(values, tile, norm.mean, memory_format_of(values)), indices[tile].long()
        # Not masked_fill, whose result is contiguous: in channels_last, the pooling would convert all other operands.
        grad = torch.where(active < 0, 0, grad_output[tile].to(centered.dtype))
        grad = pool.backward(grad, active.clamp_min_(0), centered)
        if not activation.is_relu:
            grad = _grad_before_activation(grad, centered, input, tile)
        grad.mul_(_by_channel(norm.scale, tile, values))
        if slope is not None and constant is not None:
            grad.addcmul_(centered, _by_channel(slope, tile, values)).add_(_by_channel(constant, tile, values))
        values[tile] = grad


def _pooled_tile(input: AffineInput, tile: Tile, pool: MaxPool) -> tuple[Tensor, Tensor]:
    """The maxima of the pooling and their indices, for a tile."""
    values, norm, activation = input
    assert norm.mean is not None
    buffer = _centered(values, tile, norm.mean, _pooling_format(values, tile))
    # Round before the activation, as plain modules do: rounding makes some values equal, and so changes the indices.
    normalized = _normalized(buffer, input, tile, out=buffer).to(values.dtype)
    return pool.forward(normalized.clamp_min_(0) if activation.is_relu else activation.forward(normalized))


def _normalized(centered: Tensor, input: AffineInput, tile: Tile, out: Tensor | None = None) -> Tensor:
    """The norm's output for the centered values of a tile, in the accumulation dtype."""
    vectors = _of_centered(input.norm).shift, input.norm.scale
    shift, scale = (_by_channel(vector, tile, input.values) for vector in vectors)
    return torch.addcmul(shift, centered, scale, out=out)


def _grad_before_activation(grad: Tensor, centered: Tensor, input: AffineInput, tile: Tile) -> Tensor:
    """The gradient of the norm's output, from that of the activation's."""
    rounded = _normalized(centered, input, tile).to(input.values.dtype)  # as in the forward
    return input.activation.backward(grad, rounded.to(grad.dtype))


def _of_centered(norm: BatchNormAffine) -> BatchNormAffine:
    """The norm for centered values, from which the mean is subtracted already."""
    return norm._replace(mean=None)


def _pooling_format(values: Tensor, tile: Tile) -> torch.memory_format:
    """channels_last for eight or more channels on a CPU, which PyTorch then pools ten times as fast."""
    if device_type(values) == "cpu" and values.dim() > 3 and len(range(values.shape[1])[tile[1]]) >= 8:
        return CHANNELS_LAST[values.dim()]
    return memory_format_of(values)


def _centered(values: Tensor, tile: Tile, mean: Tensor, memory_format: torch.memory_format) -> Tensor:
    """z − mean of a tile in the accumulation dtype."""
    part = values[tile]
    out = torch.empty(part.shape, dtype=mean.dtype, device=mean.device, memory_format=memory_format)
    return torch.sub(part, _by_channel(mean, tile, values), out=out)


def _by_channel(vector: Tensor, tile: Tile, values: Tensor) -> Tensor:
    """The tile's channels of a vector, as (channels, 1, …), which broadcasts with (N, channels, *spatial)."""
    return vector[tile[1]].view(-1, *[1] * (values.dim() - 2))


def _empty_pooled(values: Tensor, part: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer for all images and channels, with the spatial size of `part`, the result of one tile."""
    shape, memory_format = (*values.shape[:2], *part.shape[2:]), memory_format_of(values)
    return torch.empty(shape, dtype=dtype, device=values.device, memory_format=memory_format)


def _reduced(values: Tensor) -> list[int]:
    """All dimensions except the channels."""
    return [0, *range(2, values.dim())]


def _tiles(values: Tensor) -> Iterator[Tile]:
    for images in slices(len(values), images_at_once(values, values.shape), values):
        for channels in slices(values.shape[1], _channels_per_tile(values, values.shape), values):
            yield images, channels


def _channels_per_tile(x: Tensor, shape: torch.Size) -> int:
    return tile_bytes_for(x) // (math.prod(shape[2:]) * accumulation_dtype(x.dtype).itemsize)
