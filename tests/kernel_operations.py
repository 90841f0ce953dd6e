"""Every kernel as a function of (kernels, case), where a case holds random arguments, and a check of its accuracy."""

import copy
import math

import torch

from efficient_densenet.engines.kernels import portable
from efficient_densenet.engines.kernels.interface import AffineInput, BatchNormBackward, Conv1x1, GradAccumulator


class Case:
    """Random arguments for every operation. Each matrix is a slice of the channels of a wider one.

    `in_float64` returns the same case in float64.
    """

    def __init__(self, shape, channels, width, dtype=torch.float32, overwrite=False, device="cpu"):
        self.device = device
        self.overwrite, self.dilation, self.needs_grad_weight = overwrite, 1, True
        self.shape, self.dtype, num_rows = torch.Size(shape), dtype, math.prod(shape)
        self.values, self.grad_accum = self._matrix(num_rows, channels), self._matrix(num_rows, channels)
        self.scale, self.shift, self.grad_scale = (torch.randn(channels, device=self.device) for _ in range(3))
        self.weight1x1, self.pooled_weight = self._matrix(width, channels), self._matrix(channels // 2 + 1, channels)
        self.weight3x3 = torch.randn(width, channels, *[3] * (len(shape) - 1), device=self.device).to(dtype)
        self.grad_output, self.grad_affine = self._matrix(num_rows, width), self._matrix(num_rows, channels)
        self.grad_pooled = self._matrix(portable.halved(self.shape).numel(), len(self.pooled_weight))

    def _matrix(self, num_rows, channels):
        return torch.randn(num_rows, channels + 3, device=self.device).to(self.dtype)[:, :channels]

    def in_float64(self):
        case = copy.copy(self)
        vars(case).update({k: v.double() for k, v in vars(self).items() if isinstance(v, torch.Tensor)})
        return case

    @property
    def input(self):
        return AffineInput(self.values, self.scale, self.shift)

    def batch_norm_backward(self, grad):
        """A batch norm's backward whose grad_input is `grad`: half from its values, half from its accumulator."""
        ones = torch.ones(grad.shape[1], device=self.device, dtype=self.scale.dtype)
        return BatchNormBackward(AffineInput(grad, 0.5 * ones, 0 * ones), GradAccumulator(0.5 * ones, grad))

    def conv1x1(self, function):
        """The output of a 1×1 convolution, and what `function`, which computes it, returns."""
        output = self.weight1x1.new_empty(len(self.values), len(self.weight1x1))
        return output, *(function(Conv1x1(self.input, self.weight1x1, output)) or ())

    def next_bottleneck(self, kernels, conv):
        accumulator = GradAccumulator(self.grad_scale, self.grad_accum.clone())
        grad_output = self.batch_norm_backward(self.grad_output)
        kernels.conv1x1_backward(grad_output, self.input, self.weight1x1, accumulator, conv)

    def next_bottleneck_in_place(self, kernels):
        """As the engine calls it: with fewer channels, and in place of the values behind grad_output."""
        fewer, output = max(1, self.values.shape[1] - 2), self.grad_output.clone(memory_format=torch.contiguous_format)
        input = AffineInput(self.values[:, :fewer], self.scale[:fewer], self.shift[:fewer])
        grad_accumulator = GradAccumulator(*self.batch_norm_backward(self.grad_output).accumulator[:2])
        _, scale, shift = self.batch_norm_backward(output).input
        grad_output = BatchNormBackward(AffineInput(output, scale, shift), grad_accumulator)
        accumulator = GradAccumulator(self.grad_scale, self.grad_accum.clone())
        conv = Conv1x1(input, self.weight1x1[:, :fewer], output)
        gradients = kernels.conv1x1_backward(grad_output, self.input, self.weight1x1, accumulator, conv)
        return *gradients, accumulator.grad_accum, output

    def backward(self, function, grad_output, *rest):
        """What a backward kernel returns, and grad_accum, a slice of the channels of a wider buffer."""
        channels = self.grad_accum.shape[1]
        buffer = torch.zeros(len(self.grad_accum), channels + 5, device=self.device, dtype=self.grad_accum.dtype)
        grad_accum = buffer[:, :channels].copy_(self.grad_accum)
        accumulator = GradAccumulator(self.grad_scale, grad_accum, self.overwrite, self.needs_grad_weight)
        gradients = function(grad_output, self.input, *rest[:1], accumulator, *rest[1:])
        assert not buffer[:, channels:].any()
        if rest and not self.needs_grad_weight:
            assert gradients[0] is None
            gradients = gradients[1:]
        return *gradients, grad_accum


OPERATIONS = {
    "batch_statistics": lambda k, c: k.batch_statistics(c.values),
    "affine_forward": lambda k, c: [k.affine_forward(c.input)],
    "affine_backward": lambda k, c: c.backward(k.affine_backward, c.grad_affine),
    "conv1x1_forward": lambda k, c: c.conv1x1(k.conv1x1_forward)[:1],
    "conv1x1_forward_with_statistics": lambda k, c: c.conv1x1(k.conv1x1_forward_with_statistics),
    "conv1x1_backward": lambda k, c: c.backward(k.conv1x1_backward, c.batch_norm_backward(c.grad_output), c.weight1x1),
    "conv1x1_next_bottleneck": lambda k, c: c.conv1x1(lambda conv: c.next_bottleneck(k, conv))[:1],
    "conv1x1_next_bottleneck_in_place": lambda k, c: c.next_bottleneck_in_place(k),
    "conv3x3_forward": lambda k, c: [k.conv3x3_forward(c.input, c.weight3x3, c.shape, c.dilation)],
    "conv3x3_forward_with_statistics": lambda k, c: k.conv3x3_forward_with_statistics(
        c.input, c.weight3x3, c.shape, c.dilation
    ),
    "conv3x3_backward": lambda k, c: c.backward(k.conv3x3_backward, c.grad_output, c.weight3x3, c.shape, c.dilation),
    "pooled_conv1x1_forward": lambda k, c: [k.pooled_conv1x1_forward(c.input, c.pooled_weight, c.shape)],
    "pooled_conv1x1_backward": lambda k, c: c.backward(
        k.pooled_conv1x1_backward, c.grad_pooled, c.pooled_weight, c.shape
    ),
    "batch_norm_grad_input": lambda k, c: [
        k.batch_norm_grad_input(BatchNormBackward(c.input, GradAccumulator(c.grad_scale, c.grad_accum)))
    ],
}


def has_pooling_window(operation, shape, **_):
    """A pooled operation needs at least one pooling window."""
    return "pooled" not in operation or min(shape[1:]) > 1


def overwrite_applies(operation, overwrite, **_):
    """Only a backward accumulates into a gradient or overwrites it."""
    return "backward" in operation or not overwrite


def check(kernels, operation, case):
    """The error against float64 is at most twice the portable kernels'."""
    reference = OPERATIONS[operation](portable, case.in_float64())
    expected, actual = (OPERATIONS[operation](each, case) for each in (portable, kernels))
    assert len(actual) == len(expected) == len(reference)
    for i, (result, portable_result, exact) in enumerate(zip(actual, expected, reference, strict=True)):
        assert (result.dtype, result.shape) == (portable_result.dtype, portable_result.shape)
        slack = 4 * torch.finfo(result.dtype).eps * (exact.norm() + len(case.values) ** 0.5)
        if i == 0 and operation in ("conv3x3_backward", "pooled_conv1x1_backward"):
            slack += 2 * torch.finfo(case.dtype).eps * exact.norm()  # grad_weight is rounded by the BLAS library
        assert (result - exact).norm() <= 2 * (portable_result - exact).norm() + slack
