"""The shapes, dtypes and strides of an operation's arguments, compared with one another before a kernel is launched.

A kernel of Numba or Triton reads and writes memory by sizes alone: with those of other tensors it would damage memory
that is not theirs. So each operation of each set is `checked`. A replay repeats launches for tensors of the recorded
layouts, and compares nothing again.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .._tensors import accumulation_dtype, memory_format_of
from .interface import (
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    Conv1x1,
    GradAccumulator,
    Gradients,
    ImageConv,
    StatisticsOutput,
)
from .max_pooling import MaxPool

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def checked(operation: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The operation of a set of kernels, which raises ValueError where its arguments do not fit one another."""
    check = _CHECKS[operation.__name__]

    @functools.wraps(operation)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check(*args, **kwargs)
        return operation(*args, **kwargs)

    return run


def _batch_statistics(values: Tensor, statistics: StatisticsOutput) -> None:
    _statistics(statistics, _sizes("values", values)[1], accumulation_dtype(values.dtype))


def _center(values: Tensor, mean: Tensor, output: Tensor) -> None:
    rows, channels = _sizes("values", values)
    _tensor("mean", mean, (channels,), accumulation_dtype(output.dtype))
    _with_contiguous_rows("output", output, (rows, channels), output.dtype)


def _batch_norm_grad_input(
    grad: BatchNormBackward, may_overwrite: bool = False, previous: Tensor | None = None
) -> None:
    _batch_norm_backward(grad, _sizes("values", grad.values), grad.values.dtype)
    if may_overwrite:
        _with_contiguous_rows("grad_accum", grad.grad_accum, grad.values.shape, grad.values.dtype)
    if previous is not None:
        _with_contiguous_rows("previous", previous, grad.values.shape, grad.values.dtype)


def _affine_forward(input: AffineInput) -> None:
    _input(input)


def _affine_backward(grad_output: Tensor, input: AffineInput, accumulator: GradAccumulator) -> None:
    _tensor("grad_output", grad_output, _input(input), grad_output.dtype)
    _accumulator(accumulator, input)


def _conv1x1_forward(conv: Conv1x1, statistics: StatisticsOutput | None = None) -> None:
    input, weight, output = conv
    (rows, channels), width = _input(input), len(weight)
    _tensor("weight", weight, (width, channels), weight.dtype)
    _tensor("output", output, (rows, width), weight.dtype)
    if not output.is_contiguous():
        raise _error("output", f"with strides {output.stride()}", "contiguous memory")
    if statistics is not None:
        _statistics(statistics, width, input.dtype)


def _conv1x1_backward(
    grad_output: BatchNormBackward,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    next_bottleneck: Conv1x1 | None = None,
) -> None:
    (rows, channels), width = _input(input), len(weight)
    _tensor("weight", weight, (width, channels), weight.dtype)
    _batch_norm_backward(grad_output, (rows, width), weight.dtype)
    _accumulator(accumulator, input)
    if next_bottleneck is not None:
        _conv1x1_forward(next_bottleneck)
        (next_width, next_channels), values = next_bottleneck.weight.shape, next_bottleneck.input.values
        _tensor("values of the next bottleneck", values, (rows, min(next_channels, channels)), input.values.dtype)
        _tensor(
            "weight of the next bottleneck",
            next_bottleneck.weight,
            (min(next_width, width), next_channels),
            weight.dtype,
        )


def _conv3x3_forward(conv: ImageConv, statistics: StatisticsOutput | None = None) -> None:
    width = _image_conv(conv, [3] * (len(conv.shape) - 1))
    if statistics is not None:
        _statistics(statistics, width, conv.input.dtype)


def _conv3x3_backward(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> None:
    width = _image_conv(conv, [3] * (len(conv.shape) - 1))
    _tensor("grad_output", grad_output, (conv.shape.numel(), width), conv.weight.dtype)
    _accumulator(accumulator, conv.input)


def _pooled_conv1x1_forward(conv: ImageConv) -> None:
    _image_conv(conv, [])


def _pooled_conv1x1_backward(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> None:
    width, (num_images, *sides) = _image_conv(conv, []), conv.shape
    pooled = torch.Size([num_images, *(side // 2 for side in sides)])
    _tensor("grad_output", grad_output, (pooled.numel(), width), conv.weight.dtype)
    _accumulator(accumulator, conv.input)


def _image_statistics(values: Tensor, statistics: StatisticsOutput) -> None:
    _images(values, values.dim() - 2)
    _statistics(statistics, values.shape[1], accumulation_dtype(values.dtype))


def _norm_activation_max_pool(input: AffineInput, pool: MaxPool, dtype: torch.dtype) -> None:
    _images(input.values, len(pool.kernel_size))
    _norm(input.norm, input.values)


def _norm_activation_max_pool_reduce(grad_output: Tensor, input: AffineInput, pool: MaxPool) -> None:
    _norm_activation_max_pool(input, pool, grad_output.dtype)
    _pooled("grad_output", grad_output, input.values, pool)


def _norm_activation_max_pool_backward(
    grad_output: Tensor, indices: Tensor, input: AffineInput, pool: MaxPool, sums: Gradients, count: int
) -> None:
    _norm_activation_max_pool_reduce(grad_output, input, pool)
    _pooled("indices", indices, input.values, pool)
    for each in sums.norm_weight, sums.norm_bias:
        _tensor("sums", each, input.norm.inv_std.shape, each.dtype)


_CHECKS: dict[str, Callable[..., None]] = {
    each.__name__[1:]: each
    for each in (
        *(_batch_statistics, _center, _batch_norm_grad_input, _affine_forward, _affine_backward),
        *(_conv1x1_forward, _conv1x1_backward, _conv3x3_forward, _conv3x3_backward),
        *(_pooled_conv1x1_forward, _pooled_conv1x1_backward, _image_statistics),
        *(_norm_activation_max_pool, _norm_activation_max_pool_reduce, _norm_activation_max_pool_backward),
    )
}


def _error(name: str, found: str, needed: str) -> ValueError:
    return ValueError(f"a kernel was given {name} {found}, but needs {needed}: a layer's tensors must fit one another")


def _tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise _error(name, f"of shape {tuple(tensor.shape)} in {tensor.dtype}", f"{tuple(shape)} in {dtype}")


def _sizes(name: str, matrix: Tensor) -> tuple[int, int]:
    """The numbers of rows and channels."""
    if matrix.dim() != 2:
        raise _error(name, f"of shape {tuple(matrix.shape)}", "a matrix (pixels, channels)")
    return matrix.shape[0], matrix.shape[1]


def _with_contiguous_rows(name: str, matrix: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A matrix that a kernel writes, or of sums: its rows are contiguous, and no two of them overlap."""
    _tensor(name, matrix, shape, dtype)
    (rows, channels), (row_stride, channel_stride) = shape, matrix.stride()
    if (channel_stride != 1 and channels > 1) or (row_stride < channels and rows > 1):
        raise _error(name, f"with strides {matrix.stride()}", "rows that are contiguous and do not overlap")


def _norm(norm: BatchNormAffine, values: Tensor) -> None:
    weight, bias, inv_std, mean, _ = norm
    shape, dtype = (values.shape[1],), accumulation_dtype(values.dtype)
    _tensor("norm.weight", weight, shape, weight.dtype)
    _tensor("norm.bias", bias, shape, bias.dtype)
    _tensor("norm.inv_std", inv_std, shape, dtype)
    if mean is not None:
        _tensor("norm.mean", mean, shape, dtype)


def _input(input: AffineInput) -> tuple[int, int]:
    """The numbers of rows and channels."""
    sizes = _sizes("values", input.values)
    _norm(input.norm, input.values)
    return sizes


def _accumulator(accumulator: GradAccumulator, input: AffineInput) -> None:
    values, sums = input.values, accumulator.sums
    _with_contiguous_rows("grad_accum", accumulator.grad_accum, values.shape, values.dtype)
    if sums is not None:
        _with_contiguous_rows("sums", sums, (2, values.shape[1]), input.dtype)


def _statistics(statistics: StatisticsOutput, channels: int, dtype: torch.dtype) -> None:
    _with_contiguous_rows("statistics", statistics.matrix, (3, channels), dtype)


def _batch_norm_backward(grad: BatchNormBackward, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    _tensor("values behind grad_output", grad.values, sizes, dtype)
    _tensor("grad_accum behind grad_output", grad.grad_accum, sizes, dtype)
    for each in grad.inv_std, grad.mean:
        if each is not None:
            _tensor("statistics behind grad_output", each, sizes[1:], accumulation_dtype(dtype))
    if grad.sums is not None:
        _with_contiguous_rows("sums behind grad_output", grad.sums, (2, sizes[1]), accumulation_dtype(dtype))


def _image_conv(conv: ImageConv, kernel_size: list[int]) -> int:
    """The number of output channels."""
    input, weight, shape, dilation = conv
    rows, channels = _input(input)
    _tensor("weight", weight, (len(weight), channels, *kernel_size), weight.dtype)
    if shape.numel() != rows or not 2 <= len(shape) <= 4 or dilation < 1:
        raise _error("images", f"of shape {tuple(shape)} and dilation {dilation}", f"{rows} pixels, and dilation ≥ 1")
    return len(weight)


def _images(values: Tensor, dims: int) -> None:
    """(N, channels, *spatial), with `dims` spatial dimensions."""
    is_contiguous = values.is_contiguous(memory_format=memory_format_of(values))
    if not (values.dim() == dims + 2 > 2 and is_contiguous):
        found = f"of shape {tuple(values.shape)} and strides {values.stride()}"
        raise _error("images", found, f"{dims or 'some'} spatial dimensions and contiguous memory")


def _pooled(name: str, pooled: Tensor, values: Tensor, pool: MaxPool) -> None:
    _tensor(name, pooled, (*values.shape[:2], *pool.pooled_size(values.shape[2:])), pooled.dtype)
    if not pooled.is_contiguous(memory_format=memory_format_of(values)):
        raise _error(name, f"with strides {pooled.stride()}", "the memory format of the images")
