"""Batch statistics, and a batch norm's backward by PyTorch's own operation where that is fast and accurate."""

import torch
from torch import Tensor

from .._tensors import as_dtype
from .interface import AffineInput, BatchNormAffine, BatchNormBackward, StatisticsOutput
from .row_tiles import WHOLE, is_small, rows, tile_scratch, tiles

FEW_ROWS = 256
"""The most values of a channel that PyTorch's batch norm adds up, on a CPU, accurately: it makes no partial sums."""

_native_backward = torch.ops.aten.native_batch_norm_backward.default


def batch_statistics(values: Tensor, statistics: StatisticsOutput) -> None:
    """Mean, biased variance and 1 / sqrt(var + eps) of each channel, by two passes: var = Σ (x − mean)² / pixels."""
    mean, variance, inv_std = statistics.rows
    if is_small_batch(values, mean.dtype):
        _apply_with_statistics(statistics.norm, values, statistics)
        return
    if values.is_cpu:  # this is as accurate as var_mean there, and ten times as fast
        _mean_and_variance(values, mean, variance)
    else:
        for row, vector in zip((variance, mean), torch.var_mean(values.to(mean.dtype), 0, correction=0), strict=True):
            row.copy_(vector)
    torch.add(variance, statistics.eps, out=inv_std).rsqrt_()


def _apply_with_statistics(norm: BatchNormAffine | None, values: Tensor, statistics: StatisticsOutput) -> None:
    """The same in one call, which also applies the norm, if there is one, whose activation is kept.

    Its running variance, zero before, becomes momentum times the unbiased variance: with this momentum, the biased one.
    native_batch_norm takes a running mean with the running variance: the mean's own row, which then is the mean up to
    rounding, whichever of the two is written first.
    """
    mean, variance, inv_std = statistics.rows
    affine = (None, None) if norm is None else (as_dtype(norm.weight, mean.dtype), as_dtype(norm.bias, mean.dtype))
    output, momentum = torch.empty_like(values), 1 - 1 / values.shape[0]
    settings = mean, variance, True, momentum, statistics.eps
    torch.native_batch_norm(values, *affine, *settings, out=(output, mean, inv_std))
    if norm is not None:
        norm.keep_activation(output.relu_())


def _mean_and_variance(values: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Writes mean and variance."""
    torch.mean(values, 0, dtype=mean.dtype, out=mean)
    for tile in tiles(values, mean.dtype):
        part = rows(values, tile)
        centered = torch.sub(part, mean, out=tile_scratch("accumulation_tile", part, mean.dtype))
        squares = torch.mul(centered, centered, out=centered)
        if tile is WHOLE:
            torch.mean(squares, 0, out=variance)
        elif tile.start == 0:
            torch.sum(squares, 0, out=variance)
        else:
            variance.add_(squares.sum(0))
    if tile is not WHOLE:
        variance.div_(values.shape[0])


def is_small_batch(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether PyTorch's batch norm on a CPU, with sums in `dtype`, is fast and accurate for (pixels, channels)."""
    return is_short(values, dtype) and values.is_contiguous()


def is_short(values: Tensor, dtype: torch.dtype) -> bool:
    """The same where `values` can be copied into a contiguous matrix."""
    return values.is_cpu and values.dtype is dtype and 1 < values.shape[0] <= FEW_ROWS and is_small(values, dtype)


def batch_norm_backward(grad: Tensor, input: AffineInput) -> None:
    """All gradients of a norm with batch statistics at once, from that of its output."""
    values, norm = input
    weight, statistics = as_dtype(norm.weight, input.dtype), (norm.mean, norm.inv_std)
    norm.grad_input, norm.grad_weight, norm.grad_bias = _native_backward(
        grad, values, weight, None, None, *statistics, True, 0.0, [True, True, True]
    )


def batch_norm_grad_input(grad: BatchNormBackward) -> Tensor:
    """The gradient of the values of few rows, with both sums over them."""
    statistics = grad.mean, grad.inv_std
    grad_input, _, _ = _native_backward(
        grad.grad_accum, grad.values, None, None, None, *statistics, True, 0.0, [True, False, False]
    )
    return grad_input
