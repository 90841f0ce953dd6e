"""The forward of a stem after its convolution: statistics, then normalization, ReLU and max pooling of each tile."""

import torch
from torch import Tensor

from ..memory_format import CHANNELS_LAST
from ..shared import batch_norm
from ..shared.batch_norm import BatchNormAffine
from .conv_output import ConvOutput, Tile


def batch_statistics(conv_output: ConvOutput) -> tuple[Tensor, Tensor, int | Tensor]:
    """Mean, 1 / sqrt(var + eps) and the number of values per channel; also updates the norm's running statistics.

    The variance is computed in two passes, Σ (z − mean)² / count. A frozen norm has its running statistics.
    """
    plan, values = conv_output.plan, conv_output.values
    count = values.numel() // values.shape[1]
    if plan.frozen:
        return *batch_norm.running_statistics(plan.norm, plan.accumulation_dtype), count
    mean = values.mean(conv_output.reduced_dims, dtype=plan.accumulation_dtype)
    square_sum = torch.zeros_like(mean)
    for tile in conv_output.tiles():
        centered = conv_output.centered(tile, mean, conv_output.memory_format)
        square_sum[tile[1]] += centered.square_().sum(conv_output.reduced_dims)
    variance = square_sum.div_(count)
    mean, variance, count = batch_norm.synchronized_statistics(mean, variance, count, plan.sync_group)
    batch_norm.update_running_statistics(plan.norm, mean, batch_norm.unbiased_variance(variance, count))
    return mean, torch.rsqrt(variance + plan.eps), count


def pooled_output(conv_output: ConvOutput, mean: Tensor, norm: BatchNormAffine) -> Tensor:
    """max_pool(relu(norm(z))), (N, channels, *pooled), tile by tile."""
    output = None
    for tile in conv_output.tiles():
        maxima, _ = pooled_tile(conv_output, tile, mean, norm)
        output = conv_output.new_empty(maxima, conv_output.plan.output_dtype) if output is None else output
        output[tile] = maxima
    assert output is not None  # there is a tile
    return output


def pooled_tile(conv_output: ConvOutput, tile: Tile, mean: Tensor, norm: BatchNormAffine) -> tuple[Tensor, Tensor]:
    """The pooling's maxima and their indices."""
    buffer = conv_output.centered(tile, mean, _pooling_format(conv_output, tile))
    shift, scale = conv_output.by_channel(norm.shift, tile), conv_output.by_channel(norm.scale, tile)
    normalized = torch.addcmul(shift, buffer, scale, out=buffer)
    # Rounded before the ReLU, as plain modules do it: some values are equal only then, and ties decide the indices.
    return conv_output.plan.pool.forward(normalized.to(conv_output.plan.dtype).clamp_min_(0))


def _pooling_format(conv_output: ConvOutput, tile: Tile) -> torch.memory_format:
    """On a CPU, PyTorch pools eight or more contiguous channels ten times as fast."""
    x, channels = conv_output.x, len(conv_output.weight[tile[1]])
    if x.device.type == "cpu" and x.dim() > 3 and channels >= 8:
        return CHANNELS_LAST[x.dim()]
    return conv_output.memory_format
