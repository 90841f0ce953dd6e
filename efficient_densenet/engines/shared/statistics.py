"""The statistics of a stage's features: computed once when a channel is written, read by the norm of every consumer.

They leave the forward as one matrix, (3, columns) in the accumulation dtype. With batch statistics its first columns
are those of the features, which are stored centered (less their mean). Frozen norms of the features have columns of
their own, and the features are stored as they are. So have the bottlenecks' norms. The columns lie in the norms' order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...norms.sync_batch_norm import SyncGroup
from ..kernels import kernels_for
from ..kernels.interface import AffineInput, BatchNormBackward, GradAccumulator
from ..kernels.portable import accumulation_dtype
from ..precision import as_dtype
from .batch_norm import BatchNormAffine, Count, synchronized_statistics
from .spec import NormConv, StageSpec

MEAN, VARIANCE, INV_STD = range(3)
"""The rows of the matrix. The variance is the unbiased one."""


class _FeatureStatistics:
    """What every consumer reads: the features, and 1 / sqrt(var + eps) of each channel."""

    spec: StageSpec
    features: Tensor
    inv_std: Tensor

    def affine(self, tensors: NormConv) -> BatchNormAffine:
        """The affine map of a norm that shares the statistics of the features."""
        columns = self.spec.order.slice(0, tensors.norm_weight.shape[0])
        return BatchNormAffine.of(tensors.norm_weight, tensors.norm_bias, self.inv_std[columns])

    def input(self, norm: BatchNormAffine) -> AffineInput:
        """What the convolution after a norm of the features reads."""
        return norm.input(self.features[:, self.spec.order.slice(0, norm.weight.shape[0])])


class ForwardStatistics(_FeatureStatistics):
    """Stores a stage's features and collects the statistics of all its norms.

    `stored` is the matrix of an earlier stage with the same features.
    """

    def __init__(self, spec: StageSpec, features: Tensor, stored: Tensor | None = None) -> None:
        self.spec, self.features, self.stored = spec, features, stored
        self.dtype = accumulation_dtype(features.dtype)
        self.sync_group = SyncGroup.named(spec.sync_group)
        self.count: Count = features.shape[0]
        if stored is None:
            self.inv_std = features.new_empty(features.shape[1], dtype=self.dtype)
        else:
            self.inv_std = stored[INV_STD]
        self.of_features: list[tuple[Tensor, Tensor]] = []
        self.of_norms: list[tuple[Tensor, Tensor, Tensor]] = []

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
        features = self.features[:, columns]
        if self.spec.frozen:
            features.copy_(values) if bias is None else torch.add(values, bias, out=features)
            return
        mean, variance = self._synchronized(*statistics or kernels_for(values).batch_statistics(values))
        torch.sub(values, mean, out=features)
        torch.add(variance, self.spec.eps, out=self.inv_std[columns]).rsqrt_()
        self.of_features.append((mean if bias is None else mean + bias, variance))

    def add_norm(self, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Mean and inverse standard deviation of a norm with columns and batch statistics of its own."""
        mean, variance = self._synchronized(mean, variance)
        inv_std = torch.add(variance, eps).rsqrt_()
        self.of_norms.append((mean, variance, inv_std))
        return mean, inv_std

    def add_frozen_norm(
        self, running_mean: Tensor, running_var: Tensor, eps: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same of a frozen norm, and copies of its statistics: its buffers may change before the backward.

        The values that it reads lack the `bias`.
        """
        mean, variance = as_dtype(running_mean, self.dtype), as_dtype(running_var, self.dtype)
        mean = mean if bias is None else mean - bias
        inv_std = torch.add(variance, eps).rsqrt_()
        self.of_norms.append((mean, variance, inv_std))
        return mean, inv_std

    def matrix(self) -> Tensor:
        """All statistics, when all norms are done."""
        if self.stored is not None:
            return self.stored
        of_features = self.of_features[::-1] if self.spec.newest_first else self.of_features
        statistics = [*of_features, *self.of_norms]
        inv_std = [] if self.spec.frozen else [self.inv_std]
        rows = [each[0] for each in statistics], [each[1] for each in statistics]
        matrix = torch.cat([*rows[0], *rows[1], *inv_std, *(each[2] for each in self.of_norms)]).view(3, -1)
        if self.spec.updates:
            matrix[VARIANCE].mul_(self.count / (self.count - 1))
        return matrix

    def _synchronized(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        count = self.features.shape[0]
        mean, variance, self.count = synchronized_statistics(mean, variance, count, self.sync_group)
        return mean, variance


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
        count = features.shape[0] if count is None else count
        per_value = matrix[INV_STD] * (-1 / count)
        channels = 0 if spec.frozen else features.shape[1]
        self.inv_std, per_channel = matrix[INV_STD, :channels], per_value[:channels]
        self.coefficients = torch.stack([per_channel, self.inv_std * per_channel])
        self.sums = torch.zeros_like(self.coefficients)
        self.grad_sum, self.grad_normalized_sum = self.sums.unbind()
        self._own = self._own_affines(matrix[:, channels:], norms)
        self._own_per_value = per_value[channels:].split([weight.shape[0] for weight, _ in norms])

    def _own_affines(self, matrix: Tensor, norms: Sequence[tuple[Tensor, Tensor]]) -> list[BatchNormAffine]:
        """The affine maps of the norms with columns of their own: all at once, since each has few channels."""
        if not norms:
            return []
        weight, bias = (as_dtype(torch.cat(each), self.dtype) for each in zip(*norms, strict=True))
        whole = BatchNormAffine.of(weight, bias, matrix[INV_STD], matrix[MEAN])
        sizes = [weight.shape[0] for weight, _ in norms]
        vectors = (whole.weight, whole.scale, whole.shift, matrix[INV_STD], matrix[MEAN])
        return [BatchNormAffine(*each) for each in zip(*(vector.split(sizes) for vector in vectors), strict=True)]

    def own_affine(self, position: int) -> BatchNormAffine:
        """The affine map of a norm with columns of its own, by its place among those."""
        return self._own[position]

    def own_per_value(self, position: int) -> Tensor:
        """−r / n of such a norm."""
        return self._own_per_value[position]

    def add_gradients(self, norm: BatchNormAffine) -> None:
        """Add a consumer's γ · dβ and γ · dγ: its part of the sums of the channels it reads."""
        if not self.spec.frozen:
            columns = self.spec.order.slice(0, norm.weight.shape[0])
            self.grad_sum[columns].addcmul_(norm.weight, norm.grad_bias)
            self.grad_normalized_sum[columns].addcmul_(norm.weight, norm.grad_weight)

    def grad_input(self, grad_accum: Tensor, columns: slice) -> BatchNormBackward:
        """The gradient of channels whose last consumer is done, from the sum of the consumers' gradients.

        dx = r · (g − Σg/n − x̂ · Σ(g·x̂)/n) with g = `grad_accum`, as one affine map of the values plus r · g.
        """
        sums = self.sums[:, columns]
        if self.sync_group is not None:
            (sums,) = self.sync_group.sums(sums)
        constant, slope = (sums * self.coefficients[:, columns]).unbind()
        input = AffineInput(self.features[:, columns], slope, constant)
        return BatchNormBackward(input, GradAccumulator(self.inv_std[columns], grad_accum))
