"""Batch norms as affine maps on stored values, and what their gradients need."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..._torch_private import in_backward
from ...norms.sync_batch_norm import SyncGroup
from ..kernels import kernels_for
from ..kernels.interface import AffineInput, BatchNormBackward, GradAccumulator
from ..kernels.portable import accumulation_dtype


class BatchNormAffine:
    """One norm in one pass: `scale * values + shift`, on values less their mean, or where `mean` is given, on raw ones;
    and, once the backward has summed up, its own gradients."""

    def __init__(self, weight: Tensor, bias: Tensor, inv_std: Tensor, mean: Tensor | None = None) -> None:
        self.weight, self.inv_std, self.mean = weight.to(inv_std.dtype), inv_std, mean
        self.scale = self.weight * inv_std
        self.shift = bias.to(inv_std.dtype) if mean is None else bias - mean * self.scale

    def input(self, values: Tensor) -> AffineInput:
        """What the norm's consumer reads."""
        return AffineInput(values, self.scale, self.shift)

    def grad_scale(self, frozen: bool) -> Tensor:
        """What the map's gradient counts in that of the values, a frozen norm's, or in that of the normalised ones."""
        return self.scale if frozen else self.weight

    def set_gradients(self, grad_sum: Tensor, product_sum: Tensor) -> None:
        """Note the sums of the map's gradient and of its product with the values."""
        self.grad_bias = grad_sum
        centred = product_sum if self.mean is None else product_sum - self.mean * grad_sum
        self.grad_weight = centred * self.inv_std


def running_statistics(norm: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation of a frozen norm, as they are now."""
    mean, variance = norm.running_mean.to(dtype, copy=True), norm.running_var.to(dtype)
    return mean, torch.rsqrt(variance + norm.eps)


def synchronized_statistics(
    mean: Tensor, variance: Tensor, count: int, sync_group: SyncGroup | None
) -> tuple[Tensor, Tensor, int | Tensor]:
    """The statistics of so many values, or of those of all processes."""
    return (mean, variance, count) if sync_group is None else sync_group.statistics(mean, variance, count)


def unbiased_variance(variance: Tensor, count: int | Tensor) -> Tensor:
    return variance * (count / (count - 1))


def update_running_statistics(norm: nn.Module, mean: Tensor, unbiased_variance: Tensor) -> None:
    """Update the running statistics, in a first run."""
    if not norm.track_running_stats or in_backward():
        return
    norm.num_batches_tracked.add_(1)
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    for kept, found in ((norm.running_mean, mean), (norm.running_var, unbiased_variance)):
        if kept.dtype == found.dtype:
            kept.lerp_(found, momentum)
        else:
            kept.copy_(torch.lerp(kept.to(found.dtype), found, momentum))


def batch_norm_backward(
    values: Tensor,
    norm: BatchNormAffine,
    frozen: bool,
    grad_accum: Tensor,
    count: int | Tensor,
    sync_group: SyncGroup | None,
) -> BatchNormBackward:
    """The gradient of values that `norm` alone has normalised."""
    if frozen:
        return passthrough_backward(values, grad_accum, norm.scale.dtype)
    sums = norm.weight * norm.grad_bias, norm.weight * norm.grad_weight
    sums = sums if sync_group is None else sync_group.sums(*sums)
    return _settling(values, norm.inv_std, norm.mean, *sums, grad_accum, count)


def passthrough_backward(values: Tensor, grad: Tensor, dtype: torch.dtype) -> BatchNormBackward:
    """A gradient that is the values' own; `dtype` is the precision of sums."""
    all_of_it = grad.new_ones(grad.shape[1], dtype=dtype)
    nothing = torch.zeros_like(all_of_it)
    return BatchNormBackward(AffineInput(values, nothing, nothing), GradAccumulator(all_of_it, grad))


def _settling(
    values: Tensor,
    inv_std: Tensor,
    mean: Tensor | None,
    grad_sum: Tensor,
    product_sum: Tensor,
    grad_accum: Tensor,
    count: int | Tensor,
) -> BatchNormBackward:
    """`inverse * pending`, less what reaches the values through their mean and their deviation."""
    per_value = inv_std * (-1 / count)
    slope, shift = product_sum * inv_std * per_value, grad_sum * per_value
    shift = shift if mean is None else shift - mean * slope
    return BatchNormBackward(AffineInput(values, slope, shift), GradAccumulator(inv_std, grad_accum))


class ChannelSlices(NamedTuple):
    """Where in the matrix of features the channels lie: beside the oldest, at one end of it, the next ones."""

    total: int
    newest_first: bool

    def between(self, start: int, stop: int) -> slice:
        """The channels before which `start`, and up to the last of which `stop`, have been written."""
        return slice(self.total - stop, self.total - start) if self.newest_first else slice(start, stop)


class SharedStatistics:
    """Mean and deviation of a stage's features, measured once and read by the norm of every consumer."""

    def __init__(
        self,
        features: Tensor,
        columns: ChannelSlices,
        frozen: bool,
        eps: float,
        sync_group: SyncGroup | None,
        inv_std: Tensor | None = None,
    ) -> None:
        self.features, self.columns = features, columns
        self.frozen, self.eps, self.sync_group = frozen, eps, sync_group
        self.dtype = accumulation_dtype(features.dtype)
        zeros = features.new_zeros(features.shape[1], dtype=self.dtype)
        self.mean, self.unbiased = zeros.clone(), zeros.clone()
        self.inv_std = zeros.clone() if inv_std is None else inv_std
        self.count: int | Tensor = features.shape[0]
        self.grad_sum, self.product_sum = zeros.clone(), zeros

    def write(self, values: Tensor, place: slice, own: Sequence[Tensor] = ()) -> None:
        """Put new channels among the features, less their mean; `own` is their mean and variance, if measured."""
        if self.frozen:
            self.features[:, place].copy_(values)
            return
        own = own or kernels_for(values).batch_statistics(values)
        mean, variance, self.count = synchronized_statistics(*own, values.shape[0], self.sync_group)
        torch.sub(values, mean, out=self.features[:, place])
        self.mean[place], self.unbiased[place] = mean, unbiased_variance(variance, self.count)
        self.inv_std[place] = variance.add_(self.eps).rsqrt_()

    def map(self, weight: Tensor, bias: Tensor) -> BatchNormAffine:
        """The map of a consumer, which reads as many channels as its norm is wide."""
        return BatchNormAffine(weight, bias, self.inv_std[self._read_by(weight)])

    def read(self, consumer: BatchNormAffine) -> AffineInput:
        return consumer.input(self.features[:, self._read_by(consumer.weight)])

    def record(self, norm: nn.Module) -> None:
        if not self.frozen:
            place = self._read_by(norm.weight)
            update_running_statistics(norm, self.mean[place], self.unbiased[place])

    def absorb(self, consumer: BatchNormAffine) -> None:
        """Take note of what a consumer's gradient means for the mean and the deviation."""
        if not self.frozen:
            place = self._read_by(consumer.weight)
            self.grad_sum[place].addcmul_(consumer.weight, consumer.grad_bias)
            self.product_sum[place].addcmul_(consumer.weight, consumer.grad_weight)

    def grad_input(self, grad_accum: Tensor, place: slice) -> Tensor:
        """The gradient of the features, from the sum of their consumers' gradients."""
        values, grad_accum = self.features[:, place], grad_accum[:, place]
        if self.frozen:
            return grad_accum.contiguous()
        sums = self.grad_sum[place], self.product_sum[place]
        sums = sums if self.sync_group is None else self.sync_group.sums(*sums)
        return kernels_for(values).batch_norm_grad_input(
            _settling(values, self.inv_std[place], None, *sums, grad_accum, self.count)
        )

    def _read_by(self, weight: Tensor) -> slice:
        """The channels that were there before the consumer with such a weight."""
        return self.columns.between(0, weight.shape[0])
