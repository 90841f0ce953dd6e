"""The shared engine's kernels in plain PyTorch, for any device: the reference implementation. Read it first.

A batch norm and its activation f are applied on the fly, y = f(z) with z = scale · x + shift, to the pixel matrix x of
shape (pixels, channels), which is a view of images in channels_last memory. y is never stored in full: it is computed
for a tile of rows at a time, which stays in the processor's cache, and used there by the convolution.
The backward recomputes each tile of y in the same way. Every backward kernel then takes the same steps:

1. g = the gradient of y: grad_output @ weight for a 1×1 convolution, `convolution_backward` for a larger one
2. g *= f'(z), for which z is computed again; a ReLU takes y: g = 0 where y ≤ 0
3. grad_accum += grad_scale · g
4. Σ g and Σ g · x over the rows, from which the norm's grad_bias and grad_weight follow

and returns the gradients of the norm and of the convolution's weight (None where it is not needed). Sums and statistics
are in the accumulation dtype: float32 for half precisions.

On small inputs a kernel takes the time of its calls of PyTorch. Small inputs have one tile, so that nothing is sliced.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._tensors import CHANNELS_LAST, as_dtype, device_type
from .._torch_private import foreach_copy_
from . import convolution
from .argument_checks import checked
from .average_pooling import as_slabs, average_pool, average_pool_backward
from .interface import (
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    Conv1x1,
    GradAccumulator,
    Gradients,
    ImageConv,
    StatisticsOutput,
)
from .row_tiles import in_tiles, tiles
from .stem import (  # noqa: F401 (the stem's operations in this set)
    image_statistics,
    images_at_once,
    norm_activation_max_pool,
    norm_activation_max_pool_backward,
    norm_activation_max_pool_reduce,
)

Sums = tuple[Tensor | None, Tensor, Tensor]
"""grad_weight of a convolution, None where there is none; Σ grad and Σ grad · values over the rows, (channels,) each.
grad is the gradient of the norm's output."""

STATISTICS_ROWS, STATISTICS_GROUPS = 512, 64
"""More rows than the first are divided into groups, for PyTorch's batch norm on a CPU: it adds up rows one after
another, and the error of its sums grows with their number."""

_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_relu_backward = torch.ops.aten.threshold_backward.grad_input


def to_pixel_matrix(images: Tensor) -> Tensor:
    """(N, C, *spatial) to (pixels, C): a view of images in channels_last, a copy of other images."""
    channels, memory_format = images.shape[1], CHANNELS_LAST.get(images.dim())
    if memory_format is not None and images.is_contiguous(memory_format=memory_format):
        return images.as_strided((images.numel() // channels, channels), (channels, 1))
    return images.movedim(1, -1).flatten(0, -2)


def to_spatial(matrix: Tensor, shape: torch.Size) -> Tensor:
    """(pixels, C) to a view (N, C, *spatial), where `shape` is (N, *spatial)."""
    stride, channel_stride = matrix.stride()
    strides = [stride := stride * size for size in (1, *shape[:0:-1])]
    return matrix.as_strided((shape[0], matrix.shape[1], *shape[1:]), (strides.pop(), channel_stride, *strides[::-1]))


def halved(shape: torch.Size) -> torch.Size:
    """(N, *spatial) after pooling by two."""
    return torch.Size([shape[0], *(size // 2 for size in shape[1:])])


@checked
def batch_statistics(values: Tensor, statistics: StatisticsOutput) -> None:
    """Mean, biased variance and 1 / sqrt(var + eps) of each channel."""
    mean, variance, inv_std = statistics.rows
    foreach_copy_([mean, variance], list(_mean_and_variance(values, mean.dtype)))
    torch.add(variance, statistics.eps, out=inv_std).rsqrt_()


@checked
def center(values: Tensor, mean: Tensor, output: Tensor) -> None:
    in_tiles(lambda values, out: torch.sub(values, mean, out=out), values, output, mean.dtype)


@checked
def batch_norm_grad_input(
    grad: BatchNormBackward, may_overwrite: bool = False, previous: Tensor | None = None
) -> Tensor:
    """grad_input = slope · values + constant + inv_std · grad_accum, (pixels, channels) in the values' dtype."""
    coefficients = None if grad.sums is None else grad.coefficients()
    return _batch_norm_grad_input_tile(grad, coefficients, slice(None)).contiguous()


def arranged_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    return list(weights)


@checked
def affine_forward(input: AffineInput) -> Tensor:
    """scale · values + shift, without activation."""
    out = torch.empty_like(input.values, memory_format=torch.contiguous_format)
    scale, shift = input.norm.scale, input.norm.shift
    return in_tiles(lambda values, out: torch.addcmul(shift, values, scale, out=out), input.values, out, shift.dtype)


@checked
def affine_backward(grad_output: Tensor, input: AffineInput, accumulator: GradAccumulator) -> Gradients:
    """Steps 3 and 4 of the module's docstring, with g = grad_output."""
    sums: Sums | None = None
    for tile in tiles(input.values, input.dtype):
        sums = _add_partial_sums(sums, (None, *_accumulate_grad(grad_output[tile], input, accumulator, tile)))
    return _finish(sums, input.norm, accumulator)


@checked
def conv1x1_forward(conv: Conv1x1, statistics: StatisticsOutput | None = None) -> None:
    """output = f(scale · values + shift) @ weight.T, and its statistics."""
    for tile in tiles(conv.input.values, conv.input.dtype, convolution.ROWS_MULTIPLE):
        _conv1x1_tile(conv, tile)
    if statistics is not None:
        batch_statistics(conv.output, statistics)


@checked
def conv1x1_backward(
    grad_output: BatchNormBackward,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    next_bottleneck: Conv1x1 | None = None,
) -> Gradients:
    """g = grad_output @ weight and grad_weight = grad_output.T @ y, where grad_output is a batch norm's grad_input.

    `next_bottleneck` is computed for the same tile of rows while the features are in cache. Its output may be the
    memory of `grad_output.values`, whose rows of the tile have been read by then.
    """
    sums: Sums | None = None
    coefficients = None if grad_output.sums is None else grad_output.coefficients()
    for tile, activation in _activation_tiles(input, weight.dtype, convolution.ROWS_MULTIPLE):
        grad_output_tile = _batch_norm_grad_input_tile(grad_output, coefficients, tile)
        grad, grad_weight = _conv1x1_gradients(grad_output_tile, activation, weight, accumulator, input.dtype)
        grad = _activation_backward(grad, activation, input, tile)
        sums = _add_partial_sums(sums, (grad_weight, *_accumulate_grad(grad, input, accumulator, tile, activation)))
        if next_bottleneck is not None:
            _conv1x1_tile(next_bottleneck, tile)
    return _finish(sums, input.norm, accumulator)


@checked
def conv3x3_forward(conv: ImageConv, statistics: StatisticsOutput | None = None) -> Tensor:
    """conv(y), (pixels, out_channels), and its statistics; padding = dilation keeps the spatial size. A tile holds
    whole images."""
    input, weight, shape, dilation = conv
    output = weight.new_empty(0)
    for tile, activation in _activation_tiles(input, weight.dtype, multiple_of=shape[1:].numel()):
        part = to_pixel_matrix(convolution.conv3x3(_to_images(activation, shape), weight, dilation))
        if len(part) == len(input.values):
            output = part
        else:
            output = part.new_empty(len(input.values), part.shape[1]) if tile.start == 0 else output
            output[tile].copy_(part)
    if statistics is not None:
        batch_statistics(output, statistics)
    return output


@checked
def conv3x3_backward(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> Gradients:
    """g and grad_weight by `convolution_backward`. A tile holds whole images."""
    input, weight, shape, dilation = conv
    sums: Sums | None = None
    settings = weight, dilation, accumulator.needs_grad_weight
    for tile, activation in _activation_tiles(input, weight.dtype, multiple_of=shape[1:].numel()):
        images, grad_images = _to_images(activation, shape), _to_images(grad_output[tile], shape)
        grad, grad_weight = convolution.conv3x3_gradients(grad_images, images, *settings)
        grad_weight = None if grad_weight is None else as_dtype(grad_weight, input.dtype)
        grad = _activation_backward(to_pixel_matrix(grad), activation, input, tile)
        if accumulator.only_consumer and len(grad) == len(input.values) <= STATISTICS_ROWS:
            return _batch_norm_gradients(grad, input, grad_weight)
        sums = _add_partial_sums(sums, (grad_weight, *_accumulate_grad(grad, input, accumulator, tile, activation)))
    return _finish(sums, input.norm, accumulator)


@checked
def pooled_conv1x1_forward(conv: ImageConv) -> Tensor:
    """average_pool(y) @ weight.T, (pixels / 4, out_channels) in two dimensions.

    It equals average_pool(y @ weight.T), since both maps are linear, for a quarter of the arithmetic.
    """
    input, weight, shape = conv.input, conv.weight, as_slabs(conv.shape)
    output = weight.new_empty(halved(shape).numel(), weight.shape[0])
    for tile, activation in _activation_tiles(input, weight.dtype, multiple_of=shape[1:].numel()):
        pooled = to_pixel_matrix(average_pool(_to_images(activation, shape)))
        convolution.multiply(pooled, weight, output[_pooled_tile(tile, shape)])
    return output


@checked
def pooled_conv1x1_backward(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> Gradients:
    """g = average_pool_backward(grad_output @ weight) and grad_weight = grad_output.T @ average_pool(y)."""
    input, weight, shape = conv.input, conv.weight, as_slabs(conv.shape)
    sums: Sums | None = None
    for tile, activation in _activation_tiles(input, weight.dtype, multiple_of=shape[1:].numel()):
        images, grad_output_tile = _to_images(activation, shape), grad_output[_pooled_tile(tile, shape)]
        pooled = to_pixel_matrix(average_pool(images))
        grad_pooled, grad_weight = _conv1x1_gradients(grad_output_tile, pooled, weight, accumulator, input.dtype)
        grad_pooled = _to_images(grad_pooled, halved(shape))
        grad = to_pixel_matrix(average_pool_backward(grad_pooled, images))
        grad = _activation_backward(grad, activation, input, tile)
        sums = _add_partial_sums(sums, (grad_weight, *_accumulate_grad(grad, input, accumulator, tile, activation)))
    return _finish(sums, input.norm, accumulator)


def _mean_and_variance(values: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
    """Mean and biased variance of each channel by PyTorch's batch norm, in `dtype`, for accumulation.

    On a CPU groups of rows are side by side, as more channels, and are joined by Chan's parallel variance. The mean of
    few rows is by `torch.mean`, whose pairwise sums err less: an error of the mean is one of every row.
    """
    if (device := device_type(values)) not in ("cpu", "cuda"):
        return torch.var_mean(as_dtype(values, dtype), 0, correction=0)[::-1]
    if values.is_meta:  # which batch_norm_update_stats does not know
        return torch.var_mean(values, 0, correction=0)[::-1]
    if device == "cuda":
        return torch.batch_norm_update_stats(values, None, None, 0.0)
    if len(values) <= STATISTICS_ROWS:
        return values.mean(0, dtype=dtype), _batch_norm_statistics(values)[1]
    whole = len(values) // STATISTICS_GROUPS * STATISTICS_GROUPS
    side_by_side = values[:whole].reshape(whole // STATISTICS_GROUPS, -1)
    statistics = torch.stack(_batch_norm_statistics(side_by_side)).view(2, STATISTICS_GROUPS, -1)
    weights = statistics.new_full((STATISTICS_GROUPS, 1), whole / STATISTICS_GROUPS / len(values))
    if rest := len(values) - whole:
        statistics = torch.cat([statistics, torch.stack(_batch_norm_statistics(values[whole:]))[:, None]], 1)
        weights = torch.cat([weights, statistics.new_full((1, 1), rest / len(values))])
    means, variances = statistics.unbind()
    total_mean = (means * weights).sum(0)
    deviations = means - total_mean
    return total_mean, (torch.addcmul(variances, deviations, deviations) * weights).sum(0)


def _batch_norm_statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel. In half precision they have the dtype of the running statistics, which
    momentum 0 does not change."""
    mean = variance = None
    if values.itemsize < 4:
        mean, variance = values.new_empty(2, values.shape[1], dtype=torch.float32).unbind()
    return torch.batch_norm_update_stats(values, mean, variance, 0.0)


def _activation_tiles(input: AffineInput, dtype: torch.dtype, multiple_of: int) -> Iterator[tuple[slice, Tensor]]:
    """The tiles of rows, each as its slice, and the activation y in `dtype`."""
    for tile in tiles(input.values, input.dtype, multiple_of):
        yield tile, _activated(input.values[tile], input, dtype)


def _activated(values: Tensor, input: AffineInput, dtype: torch.dtype) -> Tensor:
    """f(scale · values + shift) of a tile's values in `dtype`."""
    if not input.activation.is_relu:
        return as_dtype(input.activation.forward(_affine(values, input.norm)), dtype)
    if dtype is input.dtype:
        return _affine(values, input.norm).relu_()
    output = torch.empty(values.shape, dtype=dtype, device=values.device)
    return torch.addcmul(input.norm.shift, values, input.norm.scale, out=output).relu_()


def _affine(values: Tensor, norm: BatchNormAffine) -> Tensor:
    """z = scale · values + shift of a tile's values."""
    return torch.addcmul(norm.shift, values, norm.scale)


def _conv1x1_tile(conv: Conv1x1, tile: slice) -> None:
    input, weight, output = conv
    convolution.multiply(_activated(input.values[tile], input, weight.dtype), weight, output[tile])


def _conv1x1_gradients(
    grad_output: Tensor, activation: Tensor, weight: Tensor, accumulator: GradAccumulator, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """grad_output @ weight, and grad_output.T @ activation in `dtype`."""
    grad, grad_weight = convolution.conv1x1_gradients(grad_output, activation, weight, accumulator.needs_grad_weight)
    return grad, None if grad_weight is None else as_dtype(grad_weight, dtype)


def _batch_norm_grad_input_tile(
    grad: BatchNormBackward, coefficients: tuple[Tensor, Tensor, Tensor] | None, tile: slice
) -> Tensor:
    """`batch_norm_grad_input` of a tile of rows."""
    grad_accum = grad.grad_accum[tile]
    if coefficients is None:
        return grad_accum
    slope, constant, inv_std = coefficients
    values = grad.values[tile]
    grad_input = torch.addcmul(constant, values, slope)
    return as_dtype(grad_input.addcmul_(grad_accum, inv_std), values.dtype)


def _activation_backward(grad: Tensor, activation: Tensor, input: AffineInput, tile: slice) -> Tensor:
    """Step 2 for a tile: the gradient of z, from that of y and in its dtype; for a ReLU in place."""
    if input.activation.is_relu:
        return _relu_backward(grad, activation, 0, grad_input=grad)
    z = _affine(input.values[tile], input.norm)
    return as_dtype(input.activation.backward(as_dtype(grad, z.dtype), z), grad.dtype)


def _accumulate_grad(
    grad: Tensor, input: AffineInput, accumulator: GradAccumulator, tile: slice, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """grad_accum += grad_scale · grad for a tile; returns the tile's Σ grad and Σ grad · values. The products are
    written over `scratch`, if its dtype is theirs."""
    grad_accum, grad_scale, values = accumulator.grad_accum[tile], input.norm.grad_scale, input.values[tile]
    if accumulator.overwrite:
        torch.mul(grad, grad_scale, out=grad_accum)
    else:
        grad_accum.addcmul_(grad, grad_scale)
    if grad.dtype is not input.dtype:  # in which a product would be rounded
        product = grad.to(input.dtype).mul_(values)
    else:
        product = torch.mul(grad, values, out=scratch)
    return grad.sum(0, dtype=input.dtype), product.sum(0)


def _batch_norm_gradients(grad: Tensor, input: AffineInput, conv_weight: Tensor | None) -> Gradients:
    """Steps 3 and 4 by PyTorch's batch norm, whose input's gradient takes as much memory as `grad`."""
    weight, mean, inv_std = input.norm.grad_scale, input.norm.mean, input.norm.inv_std
    settings = weight, None, None, mean, inv_std, True, 0.0, [True, True, True]
    grad_input, grad_weight, grad_bias = _batch_norm_backward(grad, input.values, *settings)
    return Gradients(grad_weight, grad_bias, conv_weight, grad_input)


def _add_partial_sums(sums: Sums | None, partial_sums: Sums) -> Sums:
    """The sums over the tiles so far, accumulated in the first tile's own tensors."""
    if sums is None:
        return partial_sums
    for total, partial in zip(sums, partial_sums, strict=True):
        if total is not None and partial is not None:
            total.add_(partial)
    return sums


def _finish(sums: Sums | None, norm: BatchNormAffine, accumulator: GradAccumulator) -> Gradients:
    """The gradients of the norm and of the convolution's weight, once all tiles are added up."""
    assert sums is not None  # there is a tile
    conv_weight, grad_bias, product_sum = sums
    grad_weight = norm.grad_weight(grad_bias, product_sum)
    if accumulator.sums is not None:
        accumulator.sums.addcmul_(norm.grad_scale, torch.stack([grad_bias, grad_weight]))
    return Gradients(grad_weight, grad_bias, conv_weight)


def _to_images(matrix: Tensor, shape: torch.Size) -> Tensor:
    """`to_spatial` of a tile of whole images of (N, *spatial)."""
    return to_spatial(matrix, torch.Size([matrix.shape[0] // shape[1:].numel(), *shape[1:]]))


def _pooled_tile(tile: slice, shape: torch.Size) -> slice:
    """The rows of the pooled images for a tile of whole images."""
    pixels, pooled_pixels = shape[1:].numel(), halved(shape)[1:].numel()
    return slice(tile.start // pixels * pooled_pixels, tile.stop // pixels * pooled_pixels)
