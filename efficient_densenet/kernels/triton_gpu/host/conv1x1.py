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
from . import tiles
from .common import (
    activation_constants,
    cdiv,
    divisibility,
    finish_backward,
    norm_vectors,
    run,
    with_contiguous_rows,
)


def forward(conv: Conv1x1, with_statistics: bool) -> tuple[Tensor, int]:
    """Writes the output; returns the statistics of each tile of rows, (tiles, 2, out_channels), empty unless requested,
    and the number of rows in a tile."""
    values, weight = with_contiguous_rows(conv.input.values), conv.weight.contiguous()
    (num_rows, channels), width = values.shape, weight.shape[0]
    limits, products = tiles.device_limits(values.device), product_precision(weight)
    tile = tiles.forward_tile(tiles.slice_width(width), products, limits)
    row_tiles = cdiv(num_rows, tile.rows)
    stats = values.new_empty(row_tiles if with_statistics else 0, 2, width, dtype=torch.float32)
    vectors, has_mean = norm_vectors(conv.input.norm)
    sizes = num_rows, channels, values.stride(0)
    constants = {"HAS_MEAN": has_mean, "WITH_STATISTICS": with_statistics, "PRECISION": products.input_precision}
    constants |= {"OUT_STRIDE": width, "DIVISIBILITY": divisibility(weight.dtype, *sizes[1:]), **tile.constants()}
    constants |= activation_constants(conv.input.activation)
    for out in _slices(width):
        constants["OUT_CHANNELS"] = out.stop - out.start
        tensors = _from(conv.output, out), _from(stats, out), values, *vectors, _from(weight, out, -2)
        run(conv1x1_kernels.conv1x1_forward, (row_tiles,), sizes, constants, *tensors)
    return stats, tile.rows


def backward(
    grad_output: BatchNormBackward, input: AffineInput, weight: Tensor, accumulator: GradAccumulator
) -> Gradients:
    """Accumulates the gradient of the input; returns the gradients of the parameters."""
    values, weight = with_contiguous_rows(input.values), weight.contiguous()
    grad_accum, needs_grad_weight, sums = accumulator.grad_accum, accumulator.needs_grad_weight, grad_output.sums
    (num_rows, channels), width = values.shape, weight.shape[0]
    limits, products = tiles.device_limits(values.device), product_precision(weight)
    tile = tiles.backward_tile(tiles.slice_width(width), products, limits)
    channel_tiles, num_slices = cdiv(channels, tile.channels), cdiv(width, tiles.slice_width(width))
    splits = tiles.backward_splits(num_rows, channel_tiles, tile, products, limits)
    partial_grad_weight = values.new_empty(splits if needs_grad_weight else 0, *weight.shape, dtype=torch.float32)
    partial_sums = values.new_empty(num_slices, splits, 2, channels, dtype=torch.float32)
    (vectors, has_mean), (norm_backward, has_sums, has_out_mean) = norm_vectors(input.norm), _norm_backward(grad_output)
    sizes = num_rows, channels, grad_accum.stride(0), values.stride(0), 0 if sums is None else sums.stride(0)
    constants = {"HAS_MEAN": has_mean, "FROZEN": input.norm.frozen, "NEEDS_GRAD_WEIGHT": needs_grad_weight}
    constants |= {"HAS_SUMS": has_sums, "HAS_OUT_MEAN": has_out_mean, "PRECISION": products.input_precision}
    constants |= {"DIVISIBILITY": divisibility(weight.dtype, *sizes[1:4]), "OUT_STRIDE": width}
    constants |= {**tile.constants(), "BLOCK_REST": tile.rest, **activation_constants(input.activation)}
    for i, out in enumerate(_slices(width)):
        # Slices but the first add to what the first has written.
        constants |= {"OUT_CHANNELS": out.stop - out.start, "OVERWRITE": accumulator.overwrite and out.start == 0}
        outputs = _from(partial_grad_weight, out, -2), partial_sums[i], grad_accum
        inputs = *(_from(each, out) for each in norm_backward), values, *vectors, _from(weight, out, -2)
        numbers, grid = (1 / grad_output.count, *sizes), (channel_tiles, splits)
        run(conv1x1_kernels.conv1x1_backward, grid, numbers, constants, *outputs, *inputs)
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if needs_grad_weight else None
    partial_sums = partial_sums[0] if num_slices == 1 else partial_sums.sum(0)
    return finish_backward(input.norm, accumulator.sums, partial_sums, grad_weight, partial_grad_weight)


def product_precision(weight: Tensor) -> tiles.Precision:
    """The precision of products with this weight. PyTorch's setting for convolutions chooses it for float32, where the
    device has TF32."""
    if weight.dtype.itemsize < 4:
        return tiles.Precision.HALF
    is_tf32 = precision() == "tf32" and tiles.device_limits(weight.device).has_tf32
    return tiles.Precision.TF32 if is_tf32 else tiles.Precision.IEEE


def _norm_backward(grad: BatchNormBackward) -> tuple[tuple[Tensor, ...], bool, bool]:
    """The output, its grad_accum, mean, inv_std and sums as the kernel reads them; whether it reads the sums, and the
    mean. Another tensor, which the kernel does not read, takes the place of an absent one."""
    grad_accum = grad.grad_accum.contiguous()
    if grad.sums is None or grad.inv_std is None:
        return (grad_accum,) * 5, False, False
    inv_std, has_mean = grad.inv_std.contiguous(), grad.mean is not None
    mean = grad.mean.contiguous() if grad.mean is not None else inv_std
    return (grad.values.contiguous(), grad_accum, mean, inv_std, grad.sums), True, has_mean


def _slices(width: int) -> Iterator[slice]:
    """The output channels of each launch."""
    step = tiles.slice_width(width)
    return (slice(start, min(start + step, width)) for start in range(0, width, step))


def _from(tensor: Tensor, out: slice, dim: int = -1) -> Tensor:
    """The part of `tensor` from a launch's first output channel on: the kernel bounds the number of channels itself."""
    return tensor if out.start == 0 else tensor.narrow(dim, out.start, out.stop - out.start)
