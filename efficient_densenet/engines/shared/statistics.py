"""The statistics of a stage's features: computed once when a channel is written, read by the norm of every consumer.

They leave the forward as one matrix, (3, columns) in the accumulation dtype: the rows `MEAN`, `VARIANCE` (by then the
unbiased one) and `INV_STD`. With batch statistics its first columns
are those of the features, which are stored centered (less their mean). Frozen norms of the features have columns of
their own, and the features are stored as they are. So have the bottlenecks' norms. The columns lie in the norms' order.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...norms.sync_batch_norm import SyncGroup
from ..kernels import kernels_for
from ..kernels.interface import (
    INV_STD,
    MEAN,
    VARIANCE,
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    StatisticsOutput,
)
from ..precision import accumulation_dtype
from .batch_norm import Count, batch_norm_backward, synchronize_statistics
from .spec import NormConv, StageSpec, columns_of


class _FeatureStatistics:
    """What every consumer reads: the features, and 1 / sqrt(var + eps) of each channel."""

    spec: StageSpec
    features: Tensor
    inv_std: Tensor

    def affine(self, tensors: NormConv) -> BatchNormAffine:
        """The affine map of a norm that shares the statistics of the features."""
        columns = self.spec.order.slice(0, tensors.norm_weight.shape[0])
        return BatchNormAffine(tensors.norm_weight, tensors.norm_bias, self.inv_std[columns])

    def input(self, norm: BatchNormAffine) -> AffineInput:
        """What the convolution after a norm of the features reads."""
        return norm.input(columns_of(self.features, self.spec.order.slice(0, norm.weight.shape[0])))


class ForwardStatistics(_FeatureStatistics):
    """Stores a stage's features; kernels write the statistics of all its norms into the columns of one matrix.

    `stored` is the matrix of an earlier stage with the same features.
    """

    def __init__(self, spec: StageSpec, features: Tensor, stored: Tensor | None = None) -> None:
        self.spec, self.features, self.is_stored = spec, features, stored is not None
        dtype = accumulation_dtype(features.dtype)
        self.matrix = features.new_empty(3, spec.num_columns, dtype=dtype) if stored is None else stored
        self.inv_std = self.matrix[INV_STD]
        self.sync_group = SyncGroup.named(spec.sync_group)
        self.count: Count = features.shape[0]

    @functools.cached_property
    def _columns(self) -> dict[int, tuple[Tensor, ...]]:
        """By first column, the matrix of what is written there at once, and its rows: views, made for all together."""
        widths = self.spec.column_widths
        starts = itertools.accumulate(widths[:-1], initial=0)
        views = self.matrix.split(widths, 1), *(row.split(widths) for row in self.matrix.unbind())
        return dict(zip(starts, zip(*views, strict=True), strict=True))

    def output(self, columns: slice, eps: float) -> StatisticsOutput:
        """Where a kernel writes the statistics of its output."""
        matrix, *rows = self._columns[columns.start]
        return StatisticsOutput(matrix, eps, rows)

    def of_features(self, start: int, stop: int) -> StatisticsOutput:
        """The same for the channels written as number `start` to `stop`."""
        return self.output(self.spec.order.slice(start, stop), self.spec.eps)

    def write(
        self, values: Tensor, start: int, statistics: StatisticsOutput | None = None, bias: Tensor | None = None
    ) -> None:
        """Store new channels from number `start` on, values + bias (pixels, channels), and their statistics.

        `statistics` are those of the values, computed here if None. Centered values have no bias: it is in their mean.
        """
        stop = start + values.shape[1]
        features = columns_of(self.features, self.spec.order.slice(start, stop))
        if self.spec.frozen:
            features.copy_(values) if bias is None else torch.add(values, bias, out=features)
            return
        if statistics is None:
            statistics = self.of_features(start, stop)
            kernels_for(values).batch_statistics(values, statistics)
        self._synchronize(statistics)
        mean = statistics.rows[MEAN]
        torch.sub(values, mean, out=features)
        if bias is not None:
            mean.add_(bias)

    def own_norm(self, tensors: NormConv, statistics: StatisticsOutput) -> BatchNormAffine:
        """A norm with columns and batch statistics of its own, which a kernel has written."""
        self._synchronize(statistics)
        mean, _, inv_std = statistics.rows
        return BatchNormAffine(tensors.norm_weight, tensors.norm_bias, inv_std, mean)

    def frozen_norm(
        self, tensors: NormConv, output: StatisticsOutput, running: Sequence[Tensor], bias: Tensor | None = None
    ) -> BatchNormAffine:
        """A frozen norm. Its running statistics are copied: the buffers may change before the backward.

        The values that it reads lack the `bias`.
        """
        mean, variance, inv_std = output.rows
        for row, buffer in zip((mean, variance), running, strict=True):
            row.copy_(buffer)
        if bias is not None:
            mean.sub_(bias)
        torch.add(variance, output.eps, out=inv_std).rsqrt_()
        return BatchNormAffine(tensors.norm_weight, tensors.norm_bias, inv_std, mean)

    def finish(self) -> Tensor:
        """The matrix, when all norms are done."""
        if self.spec.updates and not self.is_stored:
            self.matrix[VARIANCE].mul_(self.count / (self.count - 1))
        return self.matrix

    def _synchronize(self, statistics: StatisticsOutput) -> None:
        self.count = synchronize_statistics(statistics, self.features.shape[0], self.sync_group)


class BackwardStatistics(_FeatureStatistics):
    """A stage's features and their statistics, and what the backward sums up for them: Σg and Σ(g·x̂) of each channel.

    `norms` are the weights and biases of the norms that have columns of their own, in their order.
    """

    def __init__(
        self,
        spec: StageSpec,
        features: Tensor,
        matrix: Tensor,
        count: Count | None,
        norms: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.spec, self.features, self.dtype = spec, features, matrix.dtype
        self.sync_group = SyncGroup.named(spec.sync_group)
        self.count: Count = features.shape[0] if count is None else count
        self.inv_std = matrix[INV_STD]
        self.sums = matrix.new_zeros(2, matrix.shape[1] if spec.updates else 0)
        self._own = self._own_norms(matrix, norms)

    def _own_norms(
        self, matrix: Tensor, norms: Sequence[tuple[Tensor, Tensor]]
    ) -> list[tuple[BatchNormAffine, Tensor]]:
        """The norms with columns of their own, and those columns of the sums."""
        if not norms:
            return []
        sizes = [weight.shape[0] for weight, _ in norms]
        if not self.spec.frozen:
            sizes = [self.features.shape[1], *sizes]
        means, _, inv_stds = (row.split(sizes) for row in matrix.unbind())
        own_sums = self.sums.split(sizes, 1) if self.spec.updates else [self.sums] * len(sizes)
        first = len(sizes) - len(norms)
        columns = zip(norms, inv_stds[first:], means[first:], own_sums[first:], strict=True)
        return [(BatchNormAffine(*norm, inv_std, mean), sums) for norm, inv_std, mean, sums in columns]

    def own_norm(self, position: int) -> BatchNormAffine:
        """A norm with columns of its own, by its place among those."""
        return self._own[position][0]

    def own_sums(self, position: int) -> Tensor:
        """Σ γ · dβ and Σ γ · dγ of such a norm with batch statistics."""
        return self._own[position][1]

    def sums_of(self, norm: BatchNormAffine) -> Tensor | None:
        """Where a consumer adds its γ · dβ and γ · dγ, its part of the sums of the channels that it reads."""
        columns = self.spec.order.slice(0, norm.weight.shape[0])
        return None if self.spec.frozen else columns_of(self.sums, columns)

    def grad_input(self, grad_accum: Tensor, columns: slice) -> BatchNormBackward:
        """The gradient of channels whose last consumer is done, from the sum of the consumers' gradients."""
        norm = self.inv_std[columns], None
        return self._grad_input(columns_of(self.features, columns), grad_accum, norm, columns_of(self.sums, columns))

    def own_grad_input(self, values: Tensor, grad_accum: Tensor, position: int) -> BatchNormBackward:
        """The gradient of the values that a norm with columns and batch statistics of its own reads."""
        norm, sums = self._own[position]
        return self._grad_input(values, grad_accum, (norm.inv_std, norm.mean), sums)

    def _grad_input(
        self, values: Tensor, grad_accum: Tensor, norm: tuple[Tensor, Tensor | None], sums: Tensor
    ) -> BatchNormBackward:
        return batch_norm_backward(values, grad_accum, norm, sums, self.count, self.sync_group)
