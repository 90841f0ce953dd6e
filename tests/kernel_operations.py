"""Every kernel as a function of (kernels, case), where a case holds random arguments, and a check of its accuracy."""

import copy
import functools
import math

import torch
from helpers import assert_close

from efficient_densenet.kernels import portable, scratch
from efficient_densenet.kernels.interface import (
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    Conv1x1,
    GradAccumulator,
    StatisticsOutput,
)

EPS = 1e-3


def fill_scratch_with_nan(monkeypatch) -> None:
    """Scratch memory as an earlier overflow may leave it: a kernel must have written whatever it reads there."""
    take_buffer = scratch.buffer
    monkeypatch.setattr(scratch, "buffer", lambda *arguments: take_buffer(*arguments).fill_(math.nan))


class Case:
    """Random arguments for every operation. Each matrix is a slice of the channels of a wider one.

    `centered` values have no mean to subtract. `in_float64` returns the same case in float64.
    """

    def __init__(
        self,
        shape,
        channels,
        width,
        dtype=torch.float32,
        overwrite=False,
        device="cpu",
        centered=False,
        frozen=False,
        needs_grad_weight=True,
        dilation=1,
    ):
        self.device, self.frozen = device, frozen
        self.overwrite, self.dilation, self.needs_grad_weight = overwrite, dilation, needs_grad_weight
        self.shape, self.dtype, num_rows = torch.Size(shape), dtype, math.prod(shape)
        self.values, self.grad_accum = self._matrix(num_rows, channels), self._matrix(num_rows, channels)
        self.norm_weight, self.norm_bias, mean = (torch.randn(channels, device=self.device) for _ in range(3))
        self.inv_std, self.mean = torch.rand(channels, device=self.device) + 0.5, None if centered else mean
        self.sums = torch.randn(2, channels + 4, device=self.device)[:, 3 : channels + 3]
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

    def norm(self, channels=None):
        """The norm of the values, or of the first channels."""
        mean = None if self.mean is None else self.mean[:channels]
        vectors = (vector[:channels] for vector in (self.norm_weight, self.norm_bias, self.inv_std))
        return BatchNormAffine(*vectors, mean, self.frozen)

    @property
    def input(self):
        return AffineInput(self.values, self.norm())

    def accumulator(self, grad_accum, overwrite=False):
        """Under a frozen norm there are no sums."""
        sums = None if self.frozen else self.sums.clone()
        return GradAccumulator(grad_accum, overwrite, self.needs_grad_weight, sums)

    def results(self, grads, accumulator):
        """What a backward kernel has returned and written."""
        conv_weight = [] if grads.conv_weight is None else [grads.conv_weight]
        sums = [] if accumulator.sums is None else [accumulator.sums]
        return *conv_weight, grads.norm_bias, grads.norm_weight, *sums, accumulator.grad_accum

    def batch_norm_backward(self, values, grad_accum, channels):
        """A batch norm's backward, with vectors of its own."""
        if self.frozen:
            return BatchNormBackward(values, grad_accum)
        generator = torch.Generator(self.device).manual_seed(channels)
        vectors = torch.randn(4, channels + 1, device=self.device, generator=generator).to(self.inv_std.dtype)
        mean, inv_std = vectors[0, 1:], vectors[1, 1:].abs() + 0.5
        count = len(values)
        return BatchNormBackward(
            values, grad_accum, inv_std, None if self.mean is None else mean, vectors[2:, 1:] * count**0.5, count
        )

    def with_statistics(self, function, channels):
        """The tensor that `function` returns, if any, and the statistics that it writes into columns of a wider
        matrix."""
        matrix = torch.zeros(3, channels + 5, device=self.device, dtype=self.inv_std.dtype)
        result = function(StatisticsOutput(matrix[:, 2 : channels + 2], EPS))
        assert not matrix[:, :2].any()
        assert not matrix[:, channels + 2 :].any()
        return *([] if result is None else [result]), *matrix[:, 2 : channels + 2]

    def conv1x1(self, function):
        """The output of a 1×1 convolution that `function` computes."""
        output = self.weight1x1.new_empty(len(self.values), len(self.weight1x1))
        function(Conv1x1(self.input, self.weight1x1, output))
        return output

    def conv1x1_with_statistics(self, kernels):
        def function(statistics):
            mean, _, inv_std = statistics.rows
            norm = BatchNormAffine(torch.ones_like(mean), torch.zeros_like(mean), inv_std, mean)
            return self.conv1x1(lambda conv: kernels.conv1x1_forward_with_statistics(conv, statistics, norm))

        return self.with_statistics(function, len(self.weight1x1))

    def conv3x3_with_statistics(self, kernels):
        arguments = self.input, self.weight3x3, self.shape, self.dilation
        function = functools.partial(kernels.conv3x3_forward_with_statistics, *arguments)
        return self.with_statistics(function, len(self.weight3x3))

    def grad_bottleneck(self, values):
        return self.batch_norm_backward(values, self.grad_output, values.shape[1])

    def next_bottleneck(self, kernels, conv):
        grad_output, accumulator = self.grad_bottleneck(self.grad_output), self.accumulator(self.grad_accum.clone())
        kernels.conv1x1_backward(grad_output, self.input, self.weight1x1, accumulator, conv)

    def next_bottleneck_in_place(self, kernels):
        """As the engine calls it: with fewer channels, and in place of the values behind grad_output."""
        fewer, output = max(1, self.values.shape[1] - 2), self.grad_output.clone(memory_format=torch.contiguous_format)
        input = AffineInput(self.values[:, :fewer], self.norm(fewer))
        grad_output, accumulator = self.grad_bottleneck(output), self.accumulator(self.grad_accum.clone())
        conv = Conv1x1(input, self.weight1x1[:, :fewer], output)
        grads = kernels.conv1x1_backward(grad_output, self.input, self.weight1x1, accumulator, conv)
        return *self.results(grads, accumulator), output

    def backward(self, function, grad_output, *rest):
        """What a backward kernel returns and writes; grad_accum is a slice of the channels of a wider buffer."""
        channels = self.grad_accum.shape[1]
        buffer = torch.zeros(len(self.grad_accum), channels + 5, device=self.device, dtype=self.grad_accum.dtype)
        accumulator = self.accumulator(buffer[:, :channels].copy_(self.grad_accum), self.overwrite)
        grads = function(grad_output, self.input, *rest[:1], accumulator, *rest[1:])
        assert not buffer[:, channels:].any()
        assert (grads.conv_weight is not None) == (bool(rest) and self.needs_grad_weight)
        return self.results(grads, accumulator)


OPERATIONS = {
    "batch_statistics": lambda k, c: c.with_statistics(
        lambda statistics: k.batch_statistics(c.values, statistics), c.values.shape[1]
    ),
    "affine_forward": lambda k, c: [k.affine_forward(c.input)],
    "affine_backward": lambda k, c: c.backward(k.affine_backward, c.grad_affine),
    "conv1x1_forward": lambda k, c: [c.conv1x1(k.conv1x1_forward)],
    "conv1x1_forward_with_statistics": lambda k, c: c.conv1x1_with_statistics(k),
    "conv1x1_backward": lambda k, c: c.backward(k.conv1x1_backward, c.grad_bottleneck(c.grad_output), c.weight1x1),
    "conv1x1_next_bottleneck": lambda k, c: [c.conv1x1(lambda conv: c.next_bottleneck(k, conv))],
    "conv1x1_next_bottleneck_in_place": lambda k, c: c.next_bottleneck_in_place(k),
    "conv3x3_forward": lambda k, c: [k.conv3x3_forward(c.input, c.weight3x3, c.shape, c.dilation)],
    "conv3x3_forward_with_statistics": lambda k, c: c.conv3x3_with_statistics(k),
    "conv3x3_backward": lambda k, c: c.backward(k.conv3x3_backward, c.grad_output, c.weight3x3, c.shape, c.dilation),
    "pooled_conv1x1_forward": lambda k, c: [k.pooled_conv1x1_forward(c.input, c.pooled_weight, c.shape)],
    "pooled_conv1x1_backward": lambda k, c: c.backward(
        k.pooled_conv1x1_backward, c.grad_pooled, c.pooled_weight, c.shape
    ),
    "batch_norm_grad_input": lambda k, c: [
        k.batch_norm_grad_input(c.batch_norm_backward(c.values, c.grad_accum, c.values.shape[1]))
    ],
}


SETTINGS = {
    "usual": {},
    "overwrite": {"overwrite": True},
    "centered": {"centered": True},
    "frozen": {"frozen": True},
    "no_grad_weight": {"needs_grad_weight": False},
}
"""Arguments of a case, for what a kernel does in another way."""


def is_valid(operation, shape=(), channels=2, setting="usual", **_):
    """Whether a setting changes what an operation does; it is tried on several rows and channels. A pooled operation
    needs a pooling window."""
    if "pooled" in operation and min(shape[1:], default=2) < 2:
        return False
    if setting == "usual":
        return True
    applies = {
        "overwrite": "backward" in operation,
        "centered": operation != "batch_statistics",
        "frozen": operation != "batch_statistics",
        "no_grad_weight": operation.startswith(("conv", "pooled")) and operation.endswith("backward"),
    }
    return channels > 1 and math.prod(shape) > 7 and applies[setting]


def check(kernels, operation, case):
    """The error against float64 is at most twice the portable kernels'.

    The sums over the rows of a few channels are few numbers, and the portable kernels' errors in them may be tiny by
    chance. There the errors are also compared with the norm of the largest result, whose elements are summed.
    """
    reference = OPERATIONS[operation](portable, case.in_float64())
    few_channels = case.values.shape[1] < 8
    largest = max(exact.norm() for exact in reference)
    expected, actual = (OPERATIONS[operation](each, case) for each in (portable, kernels))
    assert len(actual) == len(expected) == len(reference)
    for i, (result, portable_result, exact) in enumerate(zip(actual, expected, reference, strict=True)):
        assert (result.dtype, result.shape) == (portable_result.dtype, portable_result.shape)
        slack = 4 * torch.finfo(result.dtype).eps * (exact.norm() + len(case.values) ** 0.5)
        slack += few_channels * 8 * torch.finfo(result.dtype).eps * largest
        if i == 0 and operation in ("conv3x3_backward", "pooled_conv1x1_backward"):
            slack += 2 * torch.finfo(case.dtype).eps * exact.norm()  # grad_weight is rounded by the BLAS library
        if exact.numel() <= 4:  # too few to compare roundings of operands, which may cancel out in one of the two
            slack += torch.finfo(case.dtype).eps / 2 * exact.norm()
        assert (result - exact).norm() <= 2 * (portable_result - exact).norm() + slack


def check_non_finite(kernels, operation, case):
    """NaN and infinity propagate as in the portable kernels.

    The non-finite pixels are inside the image: at its border they are also multiplied by the padding's zeros, which
    makes the gradients of all taps of their channel NaN instead of most.
    """
    case.values[11, 1], case.values[30, 4] = math.nan, math.inf
    results, reference = (OPERATIONS[operation](each, case) for each in (kernels, portable))
    for actual, expected in zip(results, reference, strict=True):
        assert torch.equal(actual.isfinite(), expected.isfinite())


def check_is_portable(kernels, operation, case):
    """The results are those of the portable kernels, bit for bit."""
    results, expected = (OPERATIONS[operation](each, case) for each in (kernels, portable))
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


def check_variance_far_from_zero(kernels, operation, shape, device="cpu"):
    """Each channel of what the statistics are of is one of the values, which are 1000 and a little."""
    case = Case(shape, 16, 16, device=device)
    case.values = 1000 + 0.01 * case.values
    case.mean, case.norm_bias, case.weight1x1 = None, 0 * case.norm_bias, torch.eye(16, device=case.device)
    case.norm_weight = case.inv_std = torch.ones_like(case.inv_std)
    case.weight3x3 = torch.zeros_like(case.weight3x3)
    case.weight3x3[:, :, 1, 1] = case.weight1x1
    *_, variance, _ = OPERATIONS[operation](kernels, case)
    assert_close(variance, case.values.double().var(0, correction=0).float(), 1e-3 * 1e-4)


def rounded_to_tf32(x):
    """In float64: the nearest number whose fraction has eleven bits, and of two the one farther from zero."""
    fraction, exponent = torch.frexp(x.double())
    return torch.ldexp(torch.sign(fraction) * torch.floor(fraction.abs() * 2048 + 0.5) / 2048, exponent)
