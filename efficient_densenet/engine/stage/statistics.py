"""The statistics of a stage's features: computed once when a channel is written, read by the norm of every consumer.

The forward returns them as one matrix, (3, columns) in the accumulation dtype, with the rows `MEAN`, `VARIANCE`
(unbiased at the end) and `INV_STD`. With batch statistics the features' columns come first, and the features are stored
centered (less their mean). Frozen norms of the features have columns of their own, and the features are stored as they
are. The bottlenecks' norms always have columns of their own. Columns are in the norms' order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._tensors import accumulation_dtype
from ...kernels import candidates
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
from .spec import NormConv, StageSpec, columns_of
from .synchronized import Count, batch_norm_backward, synchronize_statistics


class _FeatureStatistics:
    """The tensors that every consumer reads: the features, and 1 / sqrt(var + eps) of each channel."""

    spec: StageSpec
    features: Tensor
    inv_std: Tensor

    def affine(self, number: int, tensors: NormConv) -> BatchNormAffine:
        """The affine map of norm `number`, which shares the statistics of the features."""
        weight, bias, *_ = tensors
        return BatchNormAffine(weight, bias, self.inv_std[self.spec.feature_columns[number]])

    def input(self, number: int, norm: BatchNormAffine, activation: ActivationSpec) -> AffineInput:
        """The input of the convolution after norm `number`, a norm of the features, and its activation."""
        return AffineInput(columns_of(self.features, self.spec.feature_columns[number]), norm, activation)


class ForwardStatistics(_FeatureStatistics):
    """Stores a stage's features; kernels write the statistics of all its norms into the columns of one matrix.

    `stored` is the matrix of an earlier stage with the same features.
    """

    def __init__(self, spec: StageSpec, kernels: Kernels, features: Tensor, stored: Tensor | None = None) -> None:
        self.spec, self.kernels, self.features, self.is_stored = spec, kernels, features, stored is not None
        self.matrix = _statistics_matrix(features, spec.num_columns) if stored is None else stored
        self.sync_group = SyncGroup.named(spec.sync_group)
        self.count: Count = features.shape[0]
        self._segments, rows = spec.segments(features), self.matrix.unbind()
        self.inv_std = rows[INV_STD]
        self._outputs = list(zip(*map(spec.written_columns, (self.matrix, *rows)), strict=True))

    def output(self, norm: int, eps: float) -> StatisticsOutput:
        """Where a kernel writes the statistics of the input of a norm with columns of its own."""
        matrix, *rows = self._outputs[self.spec.own_positions[norm]]
        return StatisticsOutput(matrix, eps, rows)

    def segment_output(self, segment: int) -> StatisticsOutput:
        """Where a kernel writes the statistics of a segment of the features."""
        matrix, *rows = self._outputs[segment]
        return StatisticsOutput(matrix, self.spec.eps, rows)

    def write(
        self, values: Tensor, segment: int, statistics: StatisticsOutput | None = None, bias: Tensor | None = None
    ) -> None:
        """Store a segment of the features, values + bias (pixels, channels), and its statistics.

        `statistics` are the values' statistics, computed here if None. A bias changes the mean, not the centered
        values.
        """
        features = self._segments[segment]
        if self.spec.frozen:
            features.copy_(values) if bias is None else torch.add(values, bias, out=features)
            return
        if statistics is None:
            statistics = self.segment_output(segment)
            self.kernels.batch_statistics(values, statistics)
        self.synchronize(statistics)
        mean = statistics.rows[MEAN]
        self.kernels.center(values, mean, features)
        if bias is not None:
            mean.add_(bias)

    def own_norm(self, tensors: NormConv, statistics: StatisticsOutput) -> BatchNormAffine:
        """A norm with columns of its own, and with batch statistics that a kernel will write."""
        mean, _, inv_std = statistics.rows
        return BatchNormAffine(tensors.norm_weight, tensors.norm_bias, inv_std, mean)

    def frozen_norm(
        self, tensors: NormConv, output: StatisticsOutput, running: Sequence[Tensor], bias: Tensor | None = None
    ) -> BatchNormAffine:
        """A frozen norm. Its running statistics are copied: the buffers may change before the backward.

        `bias` is the bias of the convolution before the norm, which is not added to the norm's input.
        """
        mean, variance, inv_std = output.rows
        for row, buffer in zip((mean, variance), running, strict=True):
            row.copy_(buffer)
        if bias is not None:
            mean.sub_(bias)
        torch.add(variance, output.eps, out=inv_std).rsqrt_()
        return BatchNormAffine(tensors.norm_weight, tensors.norm_bias, inv_std, mean, frozen=True)

    def finish(self) -> Tensor:
        """The matrix, after the last norm."""
        if self.spec.updates and not self.is_stored:
            self.matrix[VARIANCE].mul_(self.count / (self.count - 1))
        return self.matrix

    def synchronize(self, statistics: StatisticsOutput) -> None:
        """Replace a kernel's statistics by the statistics over all processes of the sync group, if there is one."""
        if self.sync_group is not None:
            self.count = synchronize_statistics(statistics, self.features.shape[0], self.sync_group)


def _statistics_matrix(features: Tensor, columns: int) -> Tensor:
    """A matrix for kernels to write, zero where program instances are counted in it."""
    allocate = features.new_zeros if candidates.COMBINED_BYTES else features.new_empty
    return allocate(3, columns, dtype=accumulation_dtype(features.dtype))


class BackwardStatistics(_FeatureStatistics):
    """A stage's features, their statistics, and for the backward Σg and Σ(g·x̂) of each channel, g being the gradient of
    the normalized values x̂.

    `tensors` are the tensors of all norms; only norms with columns of their own are read.
    """

    def __init__(
        self,
        spec: StageSpec,
        features: Tensor,
        matrix: Tensor,
        count: Count | None,
        tensors: Sequence[NormConv],
    ) -> None:
        self.spec, self.features, self.dtype = spec, features, matrix.dtype
        self.sync_group = SyncGroup.named(spec.sync_group)
        self.count: Count = features.shape[0] if count is None else count
        self.sums = matrix.new_zeros(2, matrix.shape[1] if spec.updates else 0)
        means, _, self.inv_std = matrix.unbind()
        inv_stds, means = map(spec.written_columns, (self.inv_std, means))
        sums = spec.written_columns(self.sums) if spec.updates else [self.sums] * len(means)
        self._own = {
            norm: (BatchNormAffine(*tensors[norm][:2], inv_stds[i], means[i], spec.norms_frozen[norm]), sums[i])
            for norm, i in spec.own_positions.items()
        }
        self._segments = () if spec.frozen else tuple(zip(spec.segments(features), inv_stds, sums, strict=False))

    def norm(self, number: int, tensors: NormConv) -> BatchNormAffine:
        """The affine map of norm `number`, a norm of the features."""
        return self.own_norm(number) if self.spec.frozen else self.affine(number, tensors)

    def own_norm(self, number: int) -> BatchNormAffine:
        """Norm `number`, which has columns of its own."""
        return self._own[number][0]

    def own_sums(self, number: int) -> Tensor:
        """Where γ · grad_bias and γ · grad_weight of norm `number` are added, which has its own columns and
        statistics."""
        return self._own[number][1]

    def sums_of_features(self, number: int) -> Tensor | None:
        """Where γ · grad_bias and γ · grad_weight of norm `number`, a norm of the features, are added; or None."""
        return columns_of(self.sums, self.spec.feature_columns[number]) if not self.spec.frozen else None

    def grad_input(self, segment: int, grad_accum: Tensor) -> BatchNormBackward:
        """The gradient of a segment whose last consumer is done, from the sum of the consumers' gradients."""
        features, inv_std, sums = self._segments[segment]
        return self._grad_input(features, grad_accum, (inv_std, None), sums)

    def own_grad_input(self, number: int, values: Tensor, grad_accum: Tensor) -> BatchNormBackward:
        """The gradient of the values that a norm with columns and batch statistics of its own reads."""
        norm, sums = self._own[number]
        return self._grad_input(values, grad_accum, (norm.inv_std, norm.mean), sums)

    def _grad_input(
        self, values: Tensor, grad_accum: Tensor, norm: tuple[Tensor, Tensor | None], sums: Tensor
    ) -> BatchNormBackward:
        return batch_norm_backward(values, grad_accum, norm, sums, self.count, self.sync_group)
