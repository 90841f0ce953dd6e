"""Batch norms as affine maps on stored values, and what their gradients need."""

import torch
from torch import Tensor, nn

from ..torch_private import in_backward
from .kernels import portable as kernels


class Map:
    """One norm in one pass: `scale * values + shift`, on centred values, or with a frozen norm's `offset` on raw."""

    def __init__(self, weight: Tensor, bias: Tensor, inverse: Tensor, offset: Tensor | None = None) -> None:
        self.weight, self.inverse, self.offset = weight, inverse, offset
        self.scale = weight * inverse
        self.shift = bias if offset is None else bias - offset * self.scale
        self.grad_sum = torch.zeros_like(self.scale)
        self.product_sum = torch.zeros_like(self.scale)

    @property
    def frozen(self) -> bool:
        return self.offset is not None

    def add_sums(self, grad: Tensor, values: Tensor) -> None:
        grad_sum, product_sum = kernels.sums(grad, values)
        self.grad_sum += grad_sum
        self.product_sum += product_sum

    def weight_gradient(self) -> Tensor:
        """The sum of the gradient times the normalised values; the bias's is `grad_sum`."""
        centred = self.product_sum if self.offset is None else self.product_sum - self.offset * self.grad_sum
        return centred * self.inverse

    def input_gradient(self, grad: Tensor, values: Tensor) -> Tensor:
        """The gradient of what this norm alone has normalised; `grad` may be written into."""
        if not self.frozen:
            count = grad.numel() // len(self.scale)
            values = values * (self.weight_gradient() * self.inverse / -count)[:, None]
            grad = grad.add_(values).sub_((self.grad_sum / count)[:, None])
        return grad.mul_(self.scale[:, None])


def measured(norm: nn.Module, values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation of a norm's own values, which are centred in place, and recorded."""
    mean, variance = kernels.centre(values, out=values)
    record(norm, mean, variance, values.numel() // len(mean))
    return mean, torch.rsqrt(variance + norm.eps)


def running(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation of a frozen norm, as they are now."""
    return norm.running_mean.clone(), torch.rsqrt(norm.running_var + norm.eps)


def record(norm: nn.Module, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update the running statistics, in a first run."""
    if not norm.track_running_stats or in_backward():
        return
    norm.num_batches_tracked.add_(1)
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean, momentum)
    norm.running_var.lerp_(variance * (count / (count - 1)), momentum)


class SharedStatistics:
    """Mean and deviation of a stage's features, measured once and read by the norm of every consumer."""

    def __init__(self, features: Tensor, frozen: bool, eps: float, inverse: Tensor | None = None) -> None:
        self.features, self.frozen, self.eps = features, frozen, eps
        self.count = features.shape[0] * features.shape[2]
        channels = features.shape[1]
        self.mean, self.variance = features.new_zeros(channels), features.new_zeros(channels)
        self.inverse = features.new_zeros(channels) if inverse is None else inverse
        self.grad_sum, self.product_sum = features.new_zeros(channels), features.new_zeros(channels)

    def write(self, values: Tensor, start: int, stop: int) -> None:
        """Put new channels among the features."""
        place = self.features[:, start:stop]
        if self.frozen:
            place.copy_(values)
            return
        self.mean[start:stop], self.variance[start:stop] = kernels.centre(values, out=place)
        self.inverse[start:stop] = torch.rsqrt(self.variance[start:stop] + self.eps)

    def map(self, weight: Tensor, bias: Tensor) -> Map:
        """The map of a consumer, which reads as many channels as its norm is wide."""
        return Map(weight, bias, self.inverse[: len(weight)])

    def record(self, norm: nn.Module) -> None:
        if not self.frozen:
            width = norm.num_features
            record(norm, self.mean[:width], self.variance[:width], self.count)

    def absorb(self, consumer: Map) -> None:
        """Take note of what a consumer's gradient means for the mean and the deviation."""
        if not self.frozen:
            width = len(consumer.weight)
            self.grad_sum[:width] += consumer.weight * consumer.grad_sum
            self.product_sum[:width] += consumer.weight * consumer.weight_gradient()

    def share(self, consumer: Map) -> Tensor:
        """What a consumer's gradient counts, in the sum over consumers."""
        return (consumer.scale if self.frozen else consumer.weight)[:, None]

    def settled(self, pending: Tensor, start: int, stop: int) -> Tensor:
        """The gradient of the features, from the sum of their consumers' gradients."""
        if self.frozen:
            return pending.clone()
        inverse = self.inverse[start:stop]
        shift = self.grad_sum[start:stop] * inverse / -self.count
        slope = self.product_sum[start:stop] * inverse.square() / -self.count
        settled = kernels.affine(self.features[:, start:stop], slope, shift)
        return settled.addcmul_(pending, inverse[:, None])
