"""Portable's kernels in fewer operations, for few rows on a CPU, where an operation takes the time of its call.

PyTorch's batch norm computes no partial sums, but is accurate for so few rows. One call returns the statistics and the
normalized values. Another call returns all gradients, if the statistics are of these rows alone (not synchronized).
"""

import functools

import torch
from torch import Tensor

from .._tensors import as_dtype
from . import convolution, portable
from .activations import ActivationSpec
from .interface import (
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    Conv1x1,
    GradAccumulator,
    Gradients,
    StatisticsOutput,
)
from .portable import (  # noqa: F401 (part of this set)
    affine_backward,
    affine_forward,
    arranged_weights,
    conv1x1_backward,
    conv1x1_forward,
    image_statistics,
    images_at_once,
    norm_activation_max_pool,
    norm_activation_max_pool_backward,
    norm_activation_max_pool_reduce,
    pooled_conv1x1_backward,
    pooled_conv1x1_forward,
    to_pixel_matrix,
    to_spatial,
)

needs_sums = False

MAX_ROWS = 256
"""The most values of a channel that PyTorch's batch norm adds up, on a CPU, without partial sums."""

_native_backward = torch.ops.aten.native_batch_norm_backward.default


def batch_statistics(values: Tensor, statistics: StatisticsOutput) -> None:
    if values.is_contiguous() and values.dtype is statistics.matrix.dtype:
        _batch_norm(values, statistics)
    else:
        portable.batch_statistics(values, statistics)


def batch_norm_grad_input(grad: BatchNormBackward, may_overwrite: bool = False) -> Tensor:
    if grad.inv_std is None:
        return grad.grad_accum.contiguous()
    mean = _zeros(grad.values.shape[1], grad.inv_std.dtype) if grad.mean is None else grad.mean
    vectors = None, None, None, mean, grad.inv_std
    return _native_backward(grad.grad_accum, grad.values, *vectors, True, 0.0, [True, False, False])[0]


def conv1x1_forward_with_statistics(
    conv: Conv1x1, statistics: StatisticsOutput, norm: BatchNormAffine, activation: ActivationSpec
) -> AffineInput:
    if conv.output.dtype is not conv.input.dtype:
        return portable.conv1x1_forward_with_statistics(conv, statistics, norm, activation)
    conv1x1_forward(conv)
    normalized = _batch_norm(conv.output, statistics, norm)
    output = normalized.relu_() if activation.is_relu else activation.forward(normalized)
    return AffineInput(conv.output, norm, activation, output)


def conv3x3_forward(input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1) -> Tensor:
    if weight.dtype is not input.dtype:
        return portable.conv3x3_forward(input, weight, shape, dilation)
    return to_pixel_matrix(convolution.conv3x3(to_spatial(_activation(input), shape), weight, dilation))


def conv3x3_forward_with_statistics(
    input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int, statistics: StatisticsOutput
) -> Tensor:
    output = conv3x3_forward(input, weight, shape, dilation)
    batch_statistics(output, statistics)
    return output


def conv3x3_backward(
    grad_output: Tensor,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    shape: torch.Size,
    dilation: int = 1,
) -> Gradients:
    norm = input.norm
    if norm.frozen or not accumulator.is_only_consumer or weight.dtype is not input.dtype:
        return portable.conv3x3_backward(grad_output, input, weight, accumulator, shape, dilation)
    activation, grad_images = _activation(input), to_spatial(grad_output, shape)
    grad, grad_conv_weight = convolution.conv3x3_backward(
        grad_images, to_spatial(activation, shape), weight, dilation, accumulator.needs_grad_weight
    )
    grad = to_pixel_matrix(grad)
    if input.activation.is_relu:
        grad = portable.mask_inactive(grad, activation)
    else:
        grad = portable.grad_before_activation(grad, input.values, input)
    vectors = as_dtype(norm.weight, input.dtype), None, None, norm.mean, norm.inv_std
    grad_values, grad_weight, grad_bias = _native_backward(grad, input.values, *vectors, True, 0.0, [True, True, True])
    return Gradients(grad_weight, grad_bias, grad_conv_weight, grad_values)


@functools.lru_cache(maxsize=64)
def _zeros(size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype)


def _activation(input: AffineInput) -> Tensor:
    return portable.activated(input.values, input, input.dtype)[0] if input.output is None else input.output


def _batch_norm(values: Tensor, statistics: StatisticsOutput, norm: BatchNormAffine | None = None) -> Tensor:
    """The normalized values, with the parameters of `norm` if it is given; writes the statistics.

    PyTorch updates a running variance of zero to momentum times the unbiased variance: with the momentum here, that is
    the biased variance. native_batch_norm also needs a running mean. It gets the row of the mean, which then holds the
    mean up to rounding, whether PyTorch writes the batch mean or the running mean first.
    """
    mean, variance, inv_std = statistics.rows
    affine = (None, None) if norm is None else (as_dtype(norm.weight, mean.dtype), as_dtype(norm.bias, mean.dtype))
    output, momentum = torch.empty_like(values), 1 - 1 / values.shape[0]
    settings = mean, variance, True, momentum, statistics.eps
    torch.native_batch_norm(values, *affine, *settings, out=(output, mean, inv_std))
    return output
