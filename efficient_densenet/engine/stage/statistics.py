"""The statistics of a stage's features: computed once when a channel is written, read by the norm of every consumer.

The forward returns them as one matrix, (3, columns) in the accumulation dtype, with the rows `MEAN`, `VARIANCE`
(unbiased at the end) and `INV_STD`. With batch statistics the features' columns come first, and the features are stored
centered (less their mean). Frozen norms of the features have columns of their own, and the features are stored as they
are. The bottlenecks' norms always have columns of their own. Columns are in the norms' order.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..._tensors import accumulation_dtype
from ...kernels.activations import ActivationSpec
from ...kernels.interface import (
    INV_STD,
    MEAN,
    VARIANCE,
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    Kernels,
    StatisticsOutput,
)
from ...norms.sync_batch_norm import SyncGroup
from .spec import SKIPPED, NormConv, StageSpec

Count = int | Tensor
"""The number of values per channel; a tensor where the processes of a sync group have added up their counts."""


class _Statistics:
    """The features of a stage, and the statistics of all its norms in the columns of one matrix."""

    def __init__(self, spec: StageSpec, features: Tensor, matrix: Tensor) -> None:
        self.spec, self.features, self.matrix = spec, features, matrix
        self.mean, self.variance, self.inv_std = matrix.unbind()
        self.sync_group = SyncGroup.named(spec.sync_group)

    def norm(self, number: int, tensors: NormConv) -> BatchNormAffine:
        """Norm `number`. The features that it reads are stored less its mean, unless it is frozen."""
        norm = self.spec.norms[number]
        is_centered = norm.features is not None and not norm.frozen
        mean = None if is_centered else self.mean[norm.columns]
        return BatchNormAffine(tensors.norm_weight, tensors.norm_bias, self.inv_std[norm.columns], mean, norm.frozen)

    def _means(self) -> Tensor:
        """Of the features, where these are centered."""
        return self.mean[: self.features.shape[1]]

    def input(self, number: int, tensors: NormConv, activation: ActivationSpec) -> AffineInput:
        """The input of the convolution after norm `number`, a norm of the features, and its activation."""
        return AffineInput(self.features[:, self.spec.norms[number].features], self.norm(number, tensors), activation)


class ForwardStatistics(_Statistics):
    """Stores a stage's features; kernels write the statistics. `stored` is the matrix of an earlier stage with the same
    features."""

    def __init__(self, spec: StageSpec, kernels: Kernels, features: Tensor, stored: Tensor | None = None) -> None:
        self.kernels, self.is_stored = kernels, stored is not None
        if stored is None:
            stored = features.new_empty(3, spec.num_columns, dtype=accumulation_dtype(features.dtype))
        super().__init__(spec, features, stored)
        self.count: Count = features.shape[0]
        self.skipped: Tensor | None = None

    def copy_skipped(self, statistics: Tensor) -> None:
        """Take the statistics of the channels that another stage has stored, whose variances are unbiased already."""
        self.skipped = statistics
        self.matrix[:, self.spec.segment_columns(SKIPPED)].copy_(statistics)

    def output(self, columns: slice, eps: float) -> StatisticsOutput:
        """Where a kernel writes the statistics of these columns."""
        return StatisticsOutput(self.matrix[:, columns], eps)

    def write(
        self, values: Tensor, segment: int, statistics: StatisticsOutput | None = None, bias: Tensor | None = None
    ) -> None:
        """Store a segment of the features, values + bias (pixels, channels), and its statistics.

        `statistics` are the values' statistics, computed here if None. A bias changes the mean, not the centered
        values.
        """
        columns = self.spec.segment_columns(segment)
        features = self.features[:, columns]
        if self.spec.frozen:
            features.copy_(values) if bias is None else torch.add(values, bias, out=features)
            return
        if statistics is None:
            statistics = self.output(columns, self.spec.eps)
            self.kernels.batch_statistics(values, statistics)
        self.synchronize(statistics)
        mean = self.mean[columns]
        self.kernels.center(values, mean, features)
        if bias is not None:
            mean.add_(bias)

    def copy_running(self, number: int, eps: float, running: Iterator[Tensor], bias: Tensor | None = None) -> None:
        """Copy the running statistics of a frozen norm: the buffers may change before the backward.

        `bias` is the bias of the convolution before the norm, which is not added to the norm's input.
        """
        mean, variance, inv_std = self.matrix[:, self.spec.norms[number].columns].unbind()
        mean.copy_(next(running))
        variance.copy_(next(running))
        if bias is not None:
            mean.sub_(bias)
        torch.add(variance, eps, out=inv_std).rsqrt_()

    def product(self, weight: Tensor) -> Tensor:
        """The features times `weight` (out_channels, channels): a convolution that reads them without a norm."""
        output = self.features.mm(weight.t())
        return output if self.spec.frozen else output.add_(weight.to(self.mean.dtype) @ self._means())

    def finish(self) -> Tensor:
        """The matrix, after the last norm."""
        if self.spec.updates and not self.is_stored:
            self.variance.mul_(self.count / (self.count - 1))
            if self.skipped is not None:
                self.variance[self.spec.segment_columns(SKIPPED)].copy_(self.skipped[VARIANCE])
        return self.matrix

    def synchronize(self, statistics: StatisticsOutput) -> None:
        """Replace a kernel's statistics by the statistics over all processes of the sync group, if there is one."""
        if self.sync_group is not None:
            self.count = synchronize_statistics(statistics, self.features.shape[0], self.sync_group)


class BackwardStatistics(_Statistics):
    """A stage's features, their statistics, and for the backward Σg and Σ(g·x̂) of each channel, g being the gradient of
    the normalized values x̂."""

    def __init__(self, spec: StageSpec, features: Tensor, matrix: Tensor, count: Count | None) -> None:
        super().__init__(spec, features, matrix)
        self.dtype, self.count = matrix.dtype, features.shape[0] if count is None else count
        self._sums = matrix.new_zeros(2, matrix.shape[1] if spec.updates else 0)

    def sums(self, number: int) -> Tensor | None:
        """Where γ · grad_bias and γ · grad_weight of norm `number` are added, or None if it is frozen."""
        norm = self.spec.norms[number]
        return None if norm.frozen else self._sums[:, norm.columns]

    def grad_features(self, columns: slice, grad_accum: Tensor) -> BatchNormBackward:
        """The gradient of columns whose last consumer is done, from the sum of the consumers' gradients."""
        return self._grad_input(self.features[:, columns], grad_accum, columns, None)

    def grad_input(self, number: int, values: Tensor, grad_accum: Tensor) -> BatchNormBackward:
        """The gradient of the values that norm `number` inside a layer reads, with its batch statistics."""
        columns = self.spec.norms[number].columns
        return self._grad_input(values, grad_accum, columns, self.mean[columns])

    def grad_weight(self, grad: Tensor) -> Tensor:
        """The gradient of a weight with which `ForwardStatistics.product` has multiplied the features."""
        grad_weight = grad.t().mm(self.features)
        if self.spec.frozen:
            return grad_weight
        return grad_weight.add_(torch.outer(grad.sum(0, dtype=self.dtype), self._means()))

    def _grad_input(self, values: Tensor, grad_accum: Tensor, columns: slice, mean: Tensor | None) -> BatchNormBackward:
        sums, count = self._sums[:, columns], self.count
        if self.sync_group is not None:
            (sums,) = self.sync_group.sums(sums)
        if isinstance(count, Tensor):
            sums, count = sums / count, 1
        return BatchNormBackward(values, grad_accum, self.inv_std[columns], mean, sums, count)


def synchronize_statistics(statistics: StatisticsOutput, count: int, sync_group: SyncGroup | None) -> Count:
    """Replace this process's batch statistics by those of all processes of the sync group; return their count."""
    if sync_group is None:
        return count
    rows = statistics.rows
    mean, variance, total = sync_group.statistics(rows[MEAN], rows[VARIANCE], count)
    rows[MEAN].copy_(mean)
    rows[VARIANCE].copy_(variance)
    rows[INV_STD].copy_((variance + statistics.eps).rsqrt_())
    return total
