"""The 1×1 convolutions of the Triton set: launches of `conv1x1_kernels`, with tiles from `tiles`."""

import torch
from torch import Tensor

from ...interface import AffineInput, BatchNormBackward, Conv1x1, GradAccumulator, Gradients, StatisticsOutput
from ..device import conv1x1_kernels
from . import tiles
from .common import (
    cdiv,
    combine_statistics,
    divisibility,
    finish_backward,
    input_arguments,
    product_precision,
    run,
)

MAX_OUT_CHANNELS = 256
"""The most output channels: a tile holds all of them in registers."""


def is_for_triton(weight: Tensor) -> bool:
    return weight.shape[0] <= MAX_OUT_CHANNELS


def forward(conv: Conv1x1, statistics: StatisticsOutput | None = None) -> None:
    """Writes the output and, where they are requested, its statistics."""
    (values, vectors, constants), weight = input_arguments(conv.input), conv.weight.contiguous()
    (num_rows, channels), out_channels = values.shape, weight.shape[0]
    limits, products = tiles.device_limits(values.device), product_precision(weight)
    tile = tiles.forward_tile(out_channels, products, limits)
    row_tiles = cdiv(num_rows, tile.rows)
    stats = values.new_empty(row_tiles if statistics is not None else 0, 2, out_channels, dtype=torch.float32)
    sizes = num_rows, channels, values.stride(0)
    constants |= {"OUT_CHANNELS": out_channels, "PRECISION": products.input_precision}
    constants |= {"HAS_STATISTICS": statistics is not None, "DIVISIBILITY": divisibility(weight.dtype, *sizes[1:])}
    tensors = conv.output, stats, values, *vectors, weight
    run(conv1x1_kernels.conv1x1_forward, (row_tiles,), sizes, constants | tile.constants(), *tensors)
    if statistics is not None:
        combine_statistics(stats, tile.rows, num_rows, statistics)


def backward(
    grad_output: BatchNormBackward,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    next_bottleneck: Conv1x1 | None = None,
) -> Gradients:
    """Accumulates the gradient of the input; returns the gradients of the parameters. Also computes `next_bottleneck`,
    if there is one."""
    (values, vectors, constants), weight = input_arguments(input), weight.contiguous()
    grad_accum, needs_grad_weight, sums = accumulator.grad_accum, accumulator.needs_grad_weight, grad_output.sums
    (num_rows, channels), out_channels = values.shape, weight.shape[0]
    limits, products = tiles.device_limits(values.device), product_precision(weight)
    tile = tiles.backward_tile(out_channels, products, limits)
    channel_tiles = cdiv(channels, tile.channels)
    splits = tiles.backward_splits(num_rows, channel_tiles, tile, products, limits)
    partial_grad_weight = values.new_empty(splits if needs_grad_weight else 0, *weight.shape, dtype=torch.float32)
    partial_sums = values.new_empty(splits, 2, channels, dtype=torch.float32)
    norm_backward, has_sums, has_out_mean = _norm_backward(grad_output)
    sizes = num_rows, channels, grad_accum.stride(0), values.stride(0), 0 if sums is None else sums.stride(0)
    constants |= {"OUT_CHANNELS": out_channels, "FROZEN": input.norm.frozen, "NEEDS_GRAD_WEIGHT": needs_grad_weight}
    constants |= {"HAS_SUMS": has_sums, "HAS_OUT_MEAN": has_out_mean, "PRECISION": products.input_precision}
    constants |= {"DIVISIBILITY": divisibility(weight.dtype, *sizes[1:4]), "OVERWRITE": accumulator.overwrite}
    constants |= {**tile.constants(), "BLOCK_REST": tile.rest}
    tensors = partial_grad_weight, partial_sums, grad_accum, *norm_backward, values, *vectors, weight
    numbers, grid = (1 / grad_output.count, *sizes), (channel_tiles, splits)
    run(conv1x1_kernels.conv1x1_backward, grid, numbers, constants, *tensors)
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if needs_grad_weight else None
    grads = finish_backward(input.norm, accumulator.sums, partial_sums, grad_weight, partial_grad_weight)
    if next_bottleneck is not None:
        forward(next_bottleneck)
    return grads


def _norm_backward(grad: BatchNormBackward) -> tuple[tuple[Tensor, ...], bool, bool]:
    """The output, its grad_accum, mean, inv_std and sums as the kernel reads them; whether it reads the sums, and the
    mean. Another tensor, which the kernel does not read, takes the place of an absent one."""
    grad_accum = grad.grad_accum.contiguous()
    if grad.sums is None or grad.inv_std is None:
        return (grad_accum,) * 5, False, False
    inv_std, has_mean = grad.inv_std.contiguous(), grad.mean is not None
    mean = grad.mean.contiguous() if grad.mean is not None else inv_std
    return (grad.values.contiguous(), grad_accum, mean, inv_std, grad.sums), True, has_mean
