"""The statistics of a stage's features: computed once when a channel is written, read by the norm of every consumer."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...norms.sync_batch_norm import SyncGroup
from ..kernels import kernels_for
from ..kernels.interface import AffineInput
from ..kernels.portable import accumulation_dtype
from ..parts import Norm
from .batch_norm import (
    BatchNormAffine,
    Count,
    grad_input_of_normalized,
    synchronized_statistics,
    unbiased_variance,
    update_running_statistics,
)


class ChannelOrder(NamedTuple):
    """The columns of channels in a matrix, whose columns are filled from the oldest channel to the newest.

    The matrix lacks the channels before number `first`.
    """

    total: int
    newest_first: bool
    first: int = 0

    def slice(self, start: int, stop: int) -> slice:
        """The columns of the channels written as number `start` to `stop`."""
        if self.newest_first:
            return slice(self.total - stop, self.total - start)
        return slice(start - self.first, stop - self.first)


class SharedStatistics:
    """Mean and inverse standard deviation of each channel, and what the backward sums up for them.

    With batch statistics the features are stored centered. Frozen norms have statistics of their own: then the features
    are stored as they are, and the vectors here stay zero.
    """

    def __init__(
        self,
        features: Tensor,
        order: ChannelOrder,
        frozen: bool,
        eps: float,
        sync_group: SyncGroup | None,
        inv_std: Tensor | None = None,
    ) -> None:
        self.features, self.order = features, order
        self.frozen, self.eps, self.sync_group = frozen, eps, sync_group
        self.dtype = accumulation_dtype(features.dtype)
        zeros = features.new_zeros(features.shape[1], dtype=self.dtype)
        self.mean, self.unbiased_variances = zeros.clone(), zeros.clone()
        self.inv_std = zeros.clone() if inv_std is None else inv_std
        self.count: Count = features.shape[0]
        self.grad_sum, self.grad_normalized_sum = zeros.clone(), zeros

    def write(
        self,
        values: Tensor,
        columns: slice,
        statistics: tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Store new channels, values + bias (pixels, channels), and their statistics.

        `statistics` are mean and variance of the values, computed here if None. Centered values have no bias: it is in
        their mean.
        """
        if self.frozen:
            features = self.features[:, columns]
            features.copy_(values) if bias is None else torch.add(values, bias, out=features)
            return
        statistics = statistics or kernels_for(values).batch_statistics(values)
        mean, variance, self.count = synchronized_statistics(*statistics, values.shape[0], self.sync_group)
        torch.sub(values, mean, out=self.features[:, columns])
        self.mean[columns] = mean if bias is None else mean + bias
        self.unbiased_variances[columns] = unbiased_variance(variance, self.count)
        self.inv_std[columns] = variance.add_(self.eps).rsqrt_()

    def affine(self, weight: Tensor, bias: Tensor) -> BatchNormAffine:
        """The affine map of a consumer, which reads as many channels as its norm has."""
        return BatchNormAffine(weight, bias, self.inv_std[self._columns_read(weight)])

    def input(self, norm: BatchNormAffine) -> AffineInput:
        return norm.input(self.features[:, self._columns_read(norm.weight)])

    def update_running_statistics(self, norm: Norm) -> None:
        if not self.frozen:
            columns = self._columns_read(norm.weight)
            update_running_statistics(norm, self.mean[columns], self.unbiased_variances[columns])

    def add_gradients(self, norm: BatchNormAffine) -> None:
        """Add a consumer's γ · dβ and γ · dγ: its part of Σg and Σ(g·x̂) of the channels it reads."""
        if not self.frozen:
            columns = self._columns_read(norm.weight)
            self.grad_sum[columns].addcmul_(norm.weight, norm.grad_bias)
            self.grad_normalized_sum[columns].addcmul_(norm.weight, norm.grad_weight)

    def grad_input(self, grad_accum: Tensor, columns: slice) -> Tensor:
        """The gradient of channels whose last consumer is done, from the sum of the consumers' gradients."""
        values, grad_accum = self.features[:, columns], grad_accum[:, columns]
        if self.frozen:
            return grad_accum.contiguous()
        sums = self.grad_sum[columns], self.grad_normalized_sum[columns]
        grad_sum, grad_normalized_sum = sums if self.sync_group is None else self.sync_group.sums(*sums)
        backward = grad_input_of_normalized(
            values, self.inv_std[columns], None, grad_sum, grad_normalized_sum, grad_accum, self.count
        )
        return kernels_for(values).batch_norm_grad_input(backward)

    def _columns_read(self, weight: Tensor) -> slice:
        """The channels that were there before the consumer with such a norm weight."""
        return self.order.slice(0, weight.shape[0])
