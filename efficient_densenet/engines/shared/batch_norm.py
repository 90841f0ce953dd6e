"""A batch norm as an affine map on stored values, and its backward.

With the batch mean μ and r = 1/√(var + eps), a norm computes y = γ·(x − μ)·r + β = scale · x + shift, where
scale = γ·r and shift = β − μ · scale.
"""

import torch
from torch import Tensor

from ...norms.sync_batch_norm import SyncGroup
from ..kernels.interface import AffineInput, BatchNormBackward, GradAccumulator
from ..precision import as_dtype

Count = int | Tensor
"""How many values of a channel a statistic is of; a tensor where the processes of a sync group have counted."""


class BatchNormAffine:
    """One norm as scale · values + shift, and, once the backward has computed its sums, the norm's own gradients.

    With `mean` the values are stored as they are; without, they are stored centered (less their batch mean).
    """

    grad_weight: Tensor
    grad_bias: Tensor

    def __init__(
        self, weight: Tensor, scale: Tensor, shift: Tensor, inv_std: Tensor, mean: Tensor | None = None
    ) -> None:
        self.weight, self.scale, self.shift = weight, scale, shift
        self.inv_std, self.mean = inv_std, mean

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, inv_std: Tensor, mean: Tensor | None = None) -> "BatchNormAffine":
        """From the norm's parameters and statistics."""
        weight, bias = as_dtype(weight, inv_std.dtype), as_dtype(bias, inv_std.dtype)
        scale = weight * inv_std
        return cls(weight, scale, bias if mean is None else torch.addcmul(bias, mean, scale, value=-1), inv_std, mean)

    def input(self, values: Tensor) -> AffineInput:
        """What the convolution after the norm reads."""
        return AffineInput(values, self.scale, self.shift)

    def grad_scale(self, frozen: bool) -> Tensor:
        """The factor of the gradient behind the ReLU in the accumulated gradient.

        That is the gradient of the values themselves under a frozen norm, and of the normalized values x̂ under one with
        batch statistics, whose r and mean terms follow in the batch norm's backward.
        """
        return self.scale if frozen else self.weight

    def grad_conv_bias(self, frozen: bool) -> Tensor:
        """The gradient of the bias of the convolution before the norm, Σ dx over the pixels, after `set_gradients`.

        Batch statistics remove a bias: its gradient is zero, summed over the processes of a sync group.
        """
        return self.scale * self.grad_bias if frozen else torch.zeros_like(self.grad_bias)

    def set_gradients(self, grad_sum: Tensor, grad_values_sum: Tensor) -> None:
        """From Σ grad and Σ grad · values: grad_bias = Σ grad and grad_weight = Σ grad · x̂."""
        self.grad_bias = grad_sum
        centered = grad_values_sum
        if self.mean is not None:
            centered = torch.addcmul(grad_values_sum, self.mean, grad_sum, value=-1)
        self.grad_weight = centered * self.inv_std


def synchronized_statistics(
    mean: Tensor, variance: Tensor, count: int, sync_group: SyncGroup | None
) -> tuple[Tensor, Tensor, Count]:
    """Batch statistics over all processes of the sync group, from this process's own."""
    return (mean, variance, count) if sync_group is None else sync_group.statistics(mean, variance, count)


def batch_norm_backward(
    values: Tensor,
    norm: BatchNormAffine,
    frozen: bool,
    grad_accum: Tensor,
    per_value: Tensor,
    sync_group: SyncGroup | None,
) -> BatchNormBackward:
    """The arguments for the gradient of values that `norm` alone reads, which a kernel computes when it reads them.

    `grad_accum` holds grad_scale · the gradient behind the norm's ReLU; `per_value` is −r / n. With g = `grad_accum`,
    the gradient of x̂ = (x − μ) · r, dx = r · (g − Σg/n − x̂ · Σ(g·x̂)/n) is one affine map of the values plus r · g.
    """
    if frozen:
        return identity_backward(values, grad_accum, norm.scale.dtype)
    sums = norm.weight * norm.grad_bias, norm.weight * norm.grad_weight
    grad_sum, grad_normalized_sum = sums if sync_group is None else sync_group.sums(*sums)
    slope, constant = grad_normalized_sum * norm.inv_std * per_value, grad_sum * per_value
    if norm.mean is not None:
        constant = torch.addcmul(constant, norm.mean, slope, value=-1)
    return BatchNormBackward(AffineInput(values, slope, constant), GradAccumulator(norm.inv_std, grad_accum))


def identity_backward(values: Tensor, grad: Tensor, dtype: torch.dtype) -> BatchNormBackward:
    """The arguments for a gradient that is complete already: 0 · values + 0 + 1 · grad, in the accumulation `dtype`."""
    ones = grad.new_ones(grad.shape[1], dtype=dtype)
    zeros = torch.zeros_like(ones)
    return BatchNormBackward(AffineInput(values, zeros, zeros), GradAccumulator(ones, grad))
