"""A batch norm as an affine map on stored values, its running statistics and its backward.

With the batch mean μ and r = 1/√(var + eps), a norm computes y = γ·(x − μ)·r + β = scale · x + shift, where
scale = γ·r and shift = β − μ · scale.
"""

import torch
from torch import Tensor

from ..._torch_private import in_backward
from ...norms.frozen import eps_of
from ...norms.sync_batch_norm import SyncGroup
from ..kernels.interface import AffineInput, BatchNormBackward, GradAccumulator
from ..parts import Norm

Count = int | Tensor
"""How many values of a channel a statistic is of; a tensor where the processes of a sync group have counted."""


class BatchNormAffine:
    """One norm as scale · values + shift, and, once the backward has computed its sums, the norm's own gradients.

    With `mean` the values are stored as they are; without, they are stored centered (less their batch mean).
    """

    grad_weight: Tensor
    grad_bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, inv_std: Tensor, mean: Tensor | None = None) -> None:
        self.weight, self.inv_std, self.mean = weight.to(inv_std.dtype), inv_std, mean
        self.scale = self.weight * inv_std
        self.shift = bias.to(inv_std.dtype) if mean is None else bias - mean * self.scale

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
        centered = grad_values_sum if self.mean is None else grad_values_sum - self.mean * grad_sum
        self.grad_weight = centered * self.inv_std


def running_statistics(norm: Norm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of a frozen norm, as copies: the buffers may change before the backward."""
    mean, variance = norm.running_mean.to(dtype, copy=True), norm.running_var.to(dtype)
    return mean, torch.rsqrt(variance + eps_of(norm))


def synchronized_statistics(
    mean: Tensor, variance: Tensor, count: int, sync_group: SyncGroup | None
) -> tuple[Tensor, Tensor, Count]:
    """Batch statistics over all processes of the sync group, from this process's own."""
    return (mean, variance, count) if sync_group is None else sync_group.statistics(mean, variance, count)


def unbiased_variance(variance: Tensor, count: Count) -> Tensor:
    return variance * (count / (count - 1))


def update_running_statistics(norm: Norm, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics, in a forward that is no recomputation; `variance` is the unbiased one.

    Another checkpoint around this forward recomputes it while autograd executes a backward: then nothing is updated.
    The shared engine's own recomputation calls kernels only, and never comes here.
    """
    if not norm.track_running_stats or in_backward():
        return
    norm.num_batches_tracked.add_(1)
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    for running, batch in ((norm.running_mean, mean), (norm.running_var, variance)):
        if running.dtype == batch.dtype:
            running.lerp_(batch, momentum)
        else:
            running.copy_(torch.lerp(running.to(batch.dtype), batch, momentum))


def batch_norm_backward(
    values: Tensor,
    norm: BatchNormAffine,
    frozen: bool,
    grad_accum: Tensor,
    count: Count,
    sync_group: SyncGroup | None,
) -> BatchNormBackward:
    """The arguments for the gradient of values that `norm` alone reads, which a kernel computes when it reads them.

    `grad_accum` holds grad_scale · the gradient behind the norm's ReLU.
    """
    if frozen:
        return identity_backward(values, grad_accum, norm.scale.dtype)
    sums = norm.weight * norm.grad_bias, norm.weight * norm.grad_weight
    grad_sum, grad_normalized_sum = sums if sync_group is None else sync_group.sums(*sums)
    return grad_input_of_normalized(values, norm.inv_std, norm.mean, grad_sum, grad_normalized_sum, grad_accum, count)


def identity_backward(values: Tensor, grad: Tensor, dtype: torch.dtype) -> BatchNormBackward:
    """The arguments for a gradient that is complete already: 0 · values + 0 + 1 · grad, in the accumulation `dtype`."""
    ones = grad.new_ones(grad.shape[1], dtype=dtype)
    zeros = torch.zeros_like(ones)
    return BatchNormBackward(AffineInput(values, zeros, zeros), GradAccumulator(ones, grad))


def grad_input_of_normalized(
    values: Tensor,
    inv_std: Tensor,
    mean: Tensor | None,
    grad_sum: Tensor,
    grad_normalized_sum: Tensor,
    grad_accum: Tensor,
    count: Count,
) -> BatchNormBackward:
    """The arguments for dx = r · (g − Σg/n − x̂ · Σ(g·x̂)/n), as one affine map of the values plus r · g.

    g is `grad_accum`, the gradient of x̂ = (x − μ) · r; the sums are Σg and Σ(g·x̂).
    """
    per_value = inv_std * (-1 / count)
    slope, constant = grad_normalized_sum * inv_std * per_value, grad_sum * per_value
    constant = constant if mean is None else constant - mean * slope
    return BatchNormBackward(AffineInput(values, slope, constant), GradAccumulator(inv_std, grad_accum))
