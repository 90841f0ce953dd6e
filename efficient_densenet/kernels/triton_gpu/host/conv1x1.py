"""The 1×1 convolutions of the Triton set: launches of `conv1x1_kernels`, with tiles from `tiles`."""

import torch
from torch import Tensor

from ... import candidates
from ...interface import AffineInput, BatchNormBackward, Conv1x1, GradAccumulator, Gradients, StatisticsOutput
from ..device import conv1x1_kernels
from . import launch, tiles
from .common import (
    FINISHING_TILE,
    are_rounded,
    cdiv,
    combine_statistics,
    divisibility,
    finishing,
    input_arguments,
    product_precision,
    run,
    statistics_arguments,
)

MAX_OUT_CHANNELS = 256
"""The most output channels: a tile holds all of them in registers."""


def is_for_triton(weight: Tensor) -> bool:
    return weight.shape[0] <= MAX_OUT_CHANNELS


def forward(
    conv: Conv1x1, statistics: StatisticsOutput | None = None, other: launch.Launch | None = None, *tensors: Tensor
) -> None:
    """Writes the output and, where they are requested, its statistics; and does what the `other` launch, of
    `finish_backward` with these tensors, would do."""
    (values, vectors, constants), weight = input_arguments(conv.input), conv.weight.contiguous()
    (num_rows, channels), out_channels = values.shape, weight.shape[0]
    limits, products = tiles.device_limits(values.device), product_precision(weight)
    tile = tiles.forward_tile(out_channels, products, limits)
    row_tiles = cdiv(num_rows, tile.rows)
    stats = values.new_empty(row_tiles if statistics is not None else 0, 2, out_channels, dtype=torch.float32)
    matrix, numbers, with_statistics = statistics_arguments(stats, statistics)
    sizes = num_rows, channels, values.stride(0)
    constants |= {"OUT_CHANNELS": out_channels, "PRECISION": products.input_precision, **with_statistics}
    constants |= {"DIVISIBILITY": divisibility(weight.dtype, *sizes[1:]), **tile.constants()}
    constants |= {"ROUNDED": tile.rounded or are_rounded(products), "FINISHES": other is not None, **FINISHING_TILE}
    finishing_tensors, finishing_sizes, instances = [stats] * 9, (0,) * 5, row_tiles
    if other is not None:
        finishing_tensors, finishing_sizes, instances = tensors, other.numbers, row_tiles + other.grid[0]
    tensors = conv.output, stats, matrix, values, *vectors, weight, *finishing_tensors
    numbers = *sizes, *numbers, *finishing_sizes
    run(conv1x1_kernels.conv1x1_forward, (instances,), numbers, constants, *tensors)
    if statistics is not None and not with_statistics["COMBINES"]:
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
    constants |= {**tile.constants(), "BLOCK_REST": tile.rest, "PREFETCH": tile.prefetch and not accumulator.overwrite}
    tensors = partial_grad_weight, partial_sums, grad_accum, *norm_backward, values, *vectors, weight
    numbers, grid = (1 / grad_output.count, *sizes), (channel_tiles, splits)
    run(conv1x1_kernels.conv1x1_backward, grid, numbers, constants, *tensors)
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if needs_grad_weight else None
    partial = partial_sums, grad_weight, partial_grad_weight
    grads, finishing_launch, tensors = finishing(input.norm, accumulator.sums, *partial)
    is_usual = input.norm.mean is None and accumulator.sums is not None and needs_grad_weight
    if next_bottleneck is not None and candidates.NEXT_BOTTLENECK_FINISHES and is_usual:
        forward(next_bottleneck, None, finishing_launch, *tensors)
        return grads
    launch.launch(finishing_launch, *tensors)
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
