"""The forward of a stem after its convolution: statistics, then normalization, ReLU and max pooling of each tile."""

import torch
from torch import Tensor

from ..._tensors import CHANNELS_LAST
from ...kernels.interface import BatchNormAffine
from ...norms.sync_batch_norm import SyncGroup
from .conv_output import ConvOutput, Tile
from .spec import StemSpec


def batch_statistics(conv_output: ConvOutput) -> tuple[Tensor, Tensor, Tensor, int | Tensor]:
    """Mean, unbiased variance, 1 / sqrt(var + eps) and the number of values per channel.

    The variance is computed in two passes, Σ (z − mean)² / count.
    """
    spec, values = conv_output.spec, conv_output.values
    mean = values.mean(conv_output.reduced_dims, dtype=spec.accumulation_dtype)
    square_sum = torch.zeros_like(mean)
    for tile in conv_output.tiles():
        centered = conv_output.centered(tile, mean, conv_output.memory_format)
        square_sum[tile[1]] += centered.square_().sum(conv_output.reduced_dims)
    variance, group = square_sum.div_(conv_output.count), SyncGroup.named(spec.sync_group)
    count: int | Tensor = conv_output.count
    if group is not None:
        mean, variance, count = group.statistics(mean, variance, count)
    return mean, variance * (count / (count - 1)), torch.rsqrt(variance + spec.eps), count


def running_statistics(spec: StemSpec, running_mean: Tensor, running_var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of a frozen norm, as copies: the buffers may change before the backward."""
    mean, variance = running_mean.to(spec.accumulation_dtype, copy=True), running_var.to(spec.accumulation_dtype)
    return mean, torch.rsqrt(variance + spec.eps)


def pooled_output(conv_output: ConvOutput, mean: Tensor, norm: BatchNormAffine) -> Tensor:
    """max_pool(relu(norm(z))), (N, channels, *pooled), tile by tile."""
    output = None
    for tile in conv_output.tiles():
        maxima, _ = pooled_tile(conv_output, tile, mean, norm)
        output = (
            conv_output.new_empty(maxima, getattr(torch, conv_output.spec.output_dtype)) if output is None else output
        )
        output[tile] = maxima
    assert output is not None  # there is a tile
    return output


def pooled_tile(conv_output: ConvOutput, tile: Tile, mean: Tensor, norm: BatchNormAffine) -> tuple[Tensor, Tensor]:
    """The pooling's maxima and their indices."""
    buffer = conv_output.centered(tile, mean, _pooling_format(conv_output, tile))
    shift, scale = conv_output.by_channel(norm.shift, tile), conv_output.by_channel(norm.scale, tile)
    normalized = torch.addcmul(shift, buffer, scale, out=buffer)
    # Rounded before the ReLU, as plain modules do it: some values are equal only then, and ties decide the indices.
    return conv_output.spec.pool.forward(normalized.to(conv_output.spec.torch_dtype).clamp_min_(0))


def _pooling_format(conv_output: ConvOutput, tile: Tile) -> torch.memory_format:
    """On a CPU, PyTorch pools eight or more contiguous channels ten times as fast."""
    x, channels = conv_output.x, len(conv_output.weight[tile[1]])
    if x.device.type == "cpu" and x.dim() > 3 and channels >= 8:
        return CHANNELS_LAST[x.dim()]
    return conv_output.memory_format
