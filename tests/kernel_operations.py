"""Checks of a set of kernels on a case: accuracy, non-finite values, statistics, fallbacks; and cases for a grid."""

import itertools
import math

import torch
from helpers import assert_close

from efficient_densenet.kernels import portable
from efficient_densenet.kernels.comparison import OPERATIONS, Case, is_valid

CONVOLUTIONS = [name for name in OPERATIONS if name.startswith(("conv", "pooled"))]
CONV3X3 = [name for name in OPERATIONS if "conv3x3" in name]
SIZES = [
    *(((1, 1, 1), 1, 20), ((1, 1, 7), 2, 20), ((5, 4, 3), 5, 48), ((1, 9, 7), 36, 16), ((2, 5, 13), 9, 17)),
    *(((2, 9), 9, 16), ((3, 2), 4, 1), ((2, 4, 3, 5), 9, 16), ((1, 7, 2, 3), 5, 48)),
]
"""Shape, channels and width of cases in one, two and three dimensions: of one pixel, of one row, with odd sides."""


def is_case(
    operation: str, size: tuple, setting: str = "usual", activation: str = "relu", dilation: int = 1, **_: object
) -> bool:
    """Whether an operation depends on all of this."""
    shape, channels, _ = size
    depends = (activation == "relu" or operation in CONVOLUTIONS) and (dilation == 1 or operation in CONV3X3)
    return depends and is_valid(operation, shape, channels, setting)


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
    units = 64 if case.dtype is torch.float64 else 4  # in float64 the portable kernels have no error to compare with
    for i, (result, portable_result, exact) in enumerate(zip(actual, expected, reference, strict=True)):
        assert (result.dtype, result.shape) == (portable_result.dtype, portable_result.shape)
        slack = units * torch.finfo(result.dtype).eps * (exact.norm() + len(case.values) ** 0.5)
        slack += few_channels * 8 * torch.finfo(result.dtype).eps * largest
        if i == 0 and operation in ("conv3x3_backward", "pooled_conv1x1_backward"):
            slack += 2 * torch.finfo(case.dtype).eps * exact.norm()  # grad_weight is rounded by the BLAS library
        if exact.numel() <= 4:  # too few to compare roundings of operands, which may cancel out in one of the two
            slack += torch.finfo(case.dtype).eps / 2 * exact.norm()
        assert (result - exact).norm() <= 2 * (portable_result - exact).norm() + slack, i


def check_non_finite(kernels, operation, case):
    """NaN and infinity propagate as in the portable kernels on a processor. (On a GPU, PyTorch's derivative of ELU is 1
    at NaN.)

    The non-finite pixels are inside the image: at its border they are also multiplied by the padding's zeros, which
    makes the gradients of all taps of their channel NaN instead of most.
    """
    case.values[11, 1], case.values[30, 4] = math.nan, math.inf
    results, reference = OPERATIONS[operation](kernels, case), OPERATIONS[operation](portable, case.on("cpu"))
    for actual, expected in zip(results, reference, strict=True):
        assert torch.equal(actual.isfinite().cpu(), expected.isfinite())


def check_is_portable(kernels, operation, case):
    """The results are those of the portable kernels, bit for bit."""
    results, expected = (OPERATIONS[operation](each, case) for each in (kernels, portable))
    for result, other in itertools.zip_longest(results, expected):
        assert torch.equal(result, other)


def check_variance_far_from_zero(kernels, operation, shape, device="cpu"):
    """Statistics of channels each of which is one of the values, which are 1000 and a little."""
    case = Case(shape, 16, 16, device=device)
    case.values = 1000 + 0.01 * case.values
    case.mean, case.norm_bias, case.weight1x1 = None, 0 * case.norm_bias, torch.eye(16, device=case.device)
    case.norm_weight = case.inv_std = torch.ones_like(case.inv_std)
    case.weight3x3 = torch.zeros_like(case.weight3x3)
    case.weight3x3[:, :, 1, 1] = case.weight1x1
    *_, variance, _ = OPERATIONS[operation](kernels, case)
    assert_close(variance, case.values.double().var(0, correction=0).float(), 1e-3 * 1e-4)


def rounded_to_tf32(x):
    """The nearest number whose fraction has eleven bits, and of two the one farther from zero, in float64."""
    fraction, exponent = torch.frexp(x.double())
    return torch.ldexp(torch.sign(fraction) * torch.floor(fraction.abs() * 2048 + 0.5) / 2048, exponent)
