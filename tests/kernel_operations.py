"""The shared engine's operations, as each set of kernels has them, on random numbers."""

import copy
import math

import torch

from efficient_densenet.engines.kernels import portable
from efficient_densenet.engines.kernels.interface import AffineInput, BatchNormBackward, Conv1x1, GradAccumulator


class Case:
    """What the operations take, all of it part of something wider; `truth` is the same in float64."""

    def __init__(self, shape, channels, width, dtype=torch.float32, overwrite=False, device="cpu"):
        self.device = device
        self.overwrite, self.dilation, self.needs_grad_weight = overwrite, 1, True
        self.shape, self.dtype, num_rows = torch.Size(shape), dtype, math.prod(shape)
        self.values, self.grad_accum = self._matrix(num_rows, channels), self._matrix(num_rows, channels)
        self.scale, self.shift, self.grad_scale = (torch.randn(channels, device=self.device) for _ in range(3))
        self.squeeze, self.pool = self._matrix(width, channels), self._matrix(channels // 2 + 1, channels)
        self.convolve = torch.randn(width, channels, *[3] * (len(shape) - 1), device=self.device).to(dtype)
        self.of_squeezed, self.of_values = self._matrix(num_rows, width), self._matrix(num_rows, channels)
        self.of_pooled = self._matrix(portable.halved(self.shape).numel(), len(self.pool))

    def _matrix(self, num_rows, channels):
        return torch.randn(num_rows, channels + 3, device=self.device).to(self.dtype)[:, :channels]

    def truth(self):
        case = copy.copy(self)
        vars(case).update({k: v.double() for k, v in vars(self).items() if isinstance(v, torch.Tensor)})
        return case

    @property
    def read(self):
        return AffineInput(self.values, self.scale, self.shift)

    def settling(self, grad):
        """A gradient that is `grad`, and the values that it is of."""
        ones = torch.ones(grad.shape[1], device=self.device, dtype=self.scale.dtype)
        return BatchNormBackward(AffineInput(grad, 0.5 * ones, 0 * ones), GradAccumulator(0.5 * ones, grad))

    def made(self, function):
        """What a 1×1 convolution makes, and what the function returns."""
        out = self.squeeze.new_empty(len(self.values), len(self.squeeze))
        return out, *(function(Conv1x1(self.read, self.squeeze, out)) or ())

    def ahead(self, kernels, squeeze):
        into = GradAccumulator(self.grad_scale, self.grad_accum.clone())
        kernels.conv1x1_backward(self.settling(self.of_squeezed), self.read, self.squeeze, into, squeeze)

    def ahead_in_place(self, kernels):
        """As the engine does it: fewer channels, into the memory that the gradient's values lie in."""
        fewer, out = max(1, self.values.shape[1] - 2), self.of_squeezed.clone(memory_format=torch.contiguous_format)
        read = AffineInput(self.values[:, :fewer], self.scale[:fewer], self.shift[:fewer])
        accumulator = GradAccumulator(*self.settling(self.of_squeezed).accumulator[:2])
        settling = BatchNormBackward(AffineInput(out, *self.settling(out).input[1:]), accumulator)
        into = GradAccumulator(self.grad_scale, self.grad_accum.clone())
        squeeze = Conv1x1(read, self.squeeze[:, :fewer], out)
        return *kernels.conv1x1_backward(settling, self.read, self.squeeze, into, squeeze), into.grad_accum, out

    def gradients(self, function, grad, *rest):
        """Of an operation: also what is pending, the gradient's, which lies among other channels."""
        wide = torch.zeros(
            len(self.grad_accum), self.grad_accum.shape[1] + 5, device=self.device, dtype=self.grad_accum.dtype
        )
        grad_accum = wide[:, : self.grad_accum.shape[1]].copy_(self.grad_accum)
        found = function(
            grad,
            self.read,
            *rest[:1],
            GradAccumulator(self.grad_scale, grad_accum, self.overwrite, self.needs_grad_weight),
            *rest[1:],
        )
        assert not wide[:, self.grad_accum.shape[1] :].any()
        if rest and not self.needs_grad_weight:
            assert found[0] is None
            found = found[1:]
        return *found, grad_accum


OPERATIONS = {
    "batch_statistics": lambda k, c: k.batch_statistics(c.values),
    "affine_forward": lambda k, c: [k.affine_forward(c.read)],
    "affine_backward": lambda k, c: c.gradients(k.affine_backward, c.of_values),
    "conv1x1_forward": lambda k, c: c.made(k.conv1x1_forward)[:1],
    "conv1x1_forward_with_statistics": lambda k, c: c.made(k.conv1x1_forward_with_statistics),
    "conv1x1_backward": lambda k, c: c.gradients(k.conv1x1_backward, c.settling(c.of_squeezed), c.squeeze),
    "squeezed_ahead": lambda k, c: c.made(lambda squeeze: c.ahead(k, squeeze))[:1],
    "squeezed_ahead_in_place": lambda k, c: c.ahead_in_place(k),
    "conv3x3_forward": lambda k, c: [k.conv3x3_forward(c.read, c.convolve, c.shape, c.dilation)],
    "conv3x3_forward_with_statistics": lambda k, c: k.conv3x3_forward_with_statistics(
        c.read, c.convolve, c.shape, c.dilation
    ),
    "conv3x3_backward": lambda k, c: c.gradients(k.conv3x3_backward, c.of_squeezed, c.convolve, c.shape, c.dilation),
    "pooled_conv1x1_forward": lambda k, c: [k.pooled_conv1x1_forward(c.read, c.pool, c.shape)],
    "pooled_conv1x1_backward": lambda k, c: c.gradients(k.pooled_conv1x1_backward, c.of_pooled, c.pool, c.shape),
    "batch_norm_grad_input": lambda k, c: [
        k.batch_norm_grad_input(BatchNormBackward(c.read, GradAccumulator(c.grad_scale, c.grad_accum)))
    ],
}
WEIGHT_GRADIENTS = ("conv1x1_backward", "conv3x3_backward", "pooled_conv1x1_backward")


def large_enough(operation, shape, **_):
    """Whether there is a pixel to pool."""
    return "pooled" not in operation or min(shape[1:]) > 1


def accumulates_or_not(operation, first, **_):
    """Only a backward has a gradient to add to or to overwrite."""
    return "backward" in operation or not first


def check(kernels, operation, case):
    """Errs at most twice as much as portable, both judged by float64."""
    expected = OPERATIONS[operation](portable, case.truth())
    theirs, ours = (OPERATIONS[operation](each, case) for each in (portable, kernels))
    assert len(ours) == len(theirs) == len(expected)
    for i, (found, portable_s, truth) in enumerate(zip(ours, theirs, expected, strict=True)):
        assert (found.dtype, found.shape) == (portable_s.dtype, portable_s.shape)
        slack = 4 * torch.finfo(found.dtype).eps * (truth.norm() + len(case.values) ** 0.5)
        if i == 0 and operation in (
            "conv3x3_backward",
            "pooled_conv1x1_backward",
        ):  # of the weight, as the library rounds it
            slack += 2 * torch.finfo(case.dtype).eps * truth.norm()
        assert (found - truth).norm() <= 2 * (portable_s - truth).norm() + slack
