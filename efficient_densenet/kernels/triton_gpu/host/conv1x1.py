"""The 1×1 convolutions of the Triton set: launches of `conv1x1_kernels`, with tiles from `tiles`.

A convolution with more output channels than a tile holds takes several launches, one for each slice of the output
channels: the backward is linear in grad_output, so the gradients of the slices add up.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...convolution import precision
from ...interface import AffineInput, BatchNormBackward, Conv1x1, GradAccumulator, Gradients
from ..device import conv1x1_kernels
from . import launch, tiles
from .common import cdiv, divisibility, finish_backward, norm_vectors, with_contiguous_rows


def forward(conv: Conv1x1, with_statistics: bool) -> tuple[Tensor, int]:
    """Writes the output; returns the statistics of each tile of rows, (tiles, 2, out_channels), empty unless requested,
    and the number of rows in a tile."""
    values, weight = with_contiguous_rows(conv.input.values), conv.weight.contiguous()
    (num_rows, channels), width = values.shape, len(weight)
    limits, products = tiles.device_limits(values.device), product_precision(weight)
    tile = tiles.forward_tile(tiles.slice_width(width), products, limits)
    grid = (cdiv(num_rows, tile.rows),)
    stats = values.new_empty(grid[0] if with_statistics else 0, 2, width, dtype=torch.float32)
    norm, has_mean = norm_vectors(conv.input.norm)
    sizes = channels, values.stride(0)
    constants = {"HAS_MEAN": has_mean, "WITH_STATISTICS": with_statistics, "PRECISION": products.input_precision}
    constants |= {"OUT_STRIDE": width, "DIVISIBILITY": divisibility(weight.dtype, *sizes), **tile.constants()}
    for out in _slices(width):
        tensors = _from(conv.output, out), _from(stats, out), values, *norm, _from(weight, out, -2)
        constants["OUT_CHANNELS"] = out.stop - out.start
        launch.launch(conv1x1_kernels.conv1x1_forward, grid, *tensors, num_rows, *sizes, **constants)
    return stats, tile.rows


def backward(
    grad_output: BatchNormBackward, input: AffineInput, weight: Tensor, accumulator: GradAccumulator
) -> Gradients:
    """Accumulates the gradient of the input; returns the gradients of the parameters."""
    values, weight = with_contiguous_rows(input.values), weight.contiguous()
    grad_accum, needs_grad_weight = accumulator.grad_accum, accumulator.needs_grad_weight
    (num_rows, channels), width = values.shape, len(weight)
    limits, products = tiles.device_limits(values.device), product_precision(weight)
    tile = tiles.backward_tile(tiles.slice_width(width), products, limits)
    channel_tiles, slices = cdiv(channels, tile.channels), list(_slices(width))
    splits = tiles.backward_splits(num_rows, channel_tiles, tile, products, limits)
    partial_grad_weight = values.new_empty(splits if needs_grad_weight else 0, *weight.shape, dtype=torch.float32)
    partial_sums = values.new_empty(len(slices), splits, 2, channels, dtype=torch.float32)
    (norm, has_mean), (norm_backward, norm_constants) = norm_vectors(input.norm), _norm_backward(grad_output)
    sizes = channels, grad_accum.stride(0), values.stride(0)
    constants = {"HAS_MEAN": has_mean, "FROZEN": input.norm.frozen, "NEEDS_GRAD_WEIGHT": needs_grad_weight}
    constants |= {"PRECISION": products.input_precision, "OUT_STRIDE": width, **norm_constants, **tile.constants()}
    constants["BLOCK_REST"] = tile.rest
    constants["DIVISIBILITY"] = divisibility(weight.dtype, *sizes)
    sums_stride = 0 if grad_output.sums is None else grad_output.sums.stride(0)
    numbers = 1 / grad_output.count, num_rows, *sizes, sums_stride
    for i, out in enumerate(slices):
        outputs = _from(partial_grad_weight, out, -2), partial_sums[i], grad_accum
        inputs = *(_from(each, out) for each in norm_backward), values, *norm, _from(weight, out, -2)
        constants |= {"OUT_CHANNELS": out.stop - out.start, "OVERWRITE": accumulator.overwrite and i == 0}
        grid = channel_tiles, splits
        launch.launch(conv1x1_kernels.conv1x1_backward, grid, *outputs, *inputs, *numbers, **constants)
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if needs_grad_weight else None
    sums = partial_sums[0] if len(slices) == 1 else partial_sums.sum(0)
    return finish_backward(input.norm, accumulator.sums, sums, grad_weight, partial_grad_weight)


def product_precision(weight: Tensor) -> tiles.Precision:
    """The precision of products with this weight. PyTorch's setting for convolutions chooses it for float32, where the
    device has TF32."""
    if weight.dtype.itemsize < 4:
        return tiles.Precision.HALF
    is_tf32 = precision() == "tf32" and tiles.device_limits(weight.device).has_tf32
    return tiles.Precision.TF32 if is_tf32 else tiles.Precision.IEEE


def _norm_backward(grad: BatchNormBackward) -> tuple[tuple[Tensor, ...], dict[str, bool]]:
    """The output, its grad_accum, mean, inv_std and sums as the kernel reads them, and which of them exist. Another
    tensor, which the kernel does not read, takes the place of an absent one."""
    grad_accum = grad.grad_accum.contiguous()
    if grad.sums is None or grad.inv_std is None:
        return (grad_accum,) * 5, {"HAS_SUMS": False, "HAS_OUT_MEAN": False}
    inv_std, has_mean = grad.inv_std.contiguous(), grad.mean is not None
    mean = grad.mean.contiguous() if grad.mean is not None else inv_std
    vectors = mean, inv_std, grad.sums
    return (grad.values.contiguous(), grad_accum, *vectors), {"HAS_SUMS": True, "HAS_OUT_MEAN": has_mean}


def _slices(width: int) -> Iterator[slice]:
    """The output channels of each launch."""
    step = tiles.slice_width(width)
    return (slice(start, min(start + step, width)) for start in range(0, width, step))


def _from(tensor: Tensor, out: slice, dim: int = -1) -> Tensor:
    """The part of `tensor` from a launch's first output channel on: the kernel bounds the number of channels itself."""
    return tensor if out.start == 0 else tensor.narrow(dim, out.start, out.stop - out.start)
