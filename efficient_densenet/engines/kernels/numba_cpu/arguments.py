"""The arguments of each kernel: a record for each, made of groups that several kernels share.

A record and its groups are written here as annotated classes. A kernel reads them as a NumPy structured dtype: an
integer or an `Address` is an int64, a group a nested record, all zeros where it is absent. At the end lies `zero`, the
0 of the dtype that the kernel is compiled for.

The host writes a record as one flat tuple of `Fields`, since each launch takes the time to write one: integers, and the
tensors whose addresses the kernel reads. The tuple keeps those alive, which may be copies: an input that does not lie
in memory as a kernel reads it is copied. An output must lie so.
"""

import functools
import math
import struct
import types
import typing
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .. import interface

REMEMBERED_SIZES = 4096
"""What follows from sizes is computed once for so many different ones: they are the same in every step."""

Address = int

Fields = tuple[int | Tensor, ...]
"""What the host writes for a group: its integers and, for each address, a tensor or the address itself."""


class OpenMP:
    """Addresses of functions, from `openmp.functions`."""

    thread_number: Address
    num_threads: Address
    barrier: Address


class Matrix:
    """(pixels, channels); every row is contiguous, row_stride counts elements."""

    data: Address
    row_stride: int

    @staticmethod
    def of(tensor: Tensor) -> Fields:
        if not _has_contiguous_rows(tensor):
            tensor = tensor.contiguous()
        return tensor, tensor.stride(0)

    @staticmethod
    def output(tensor: Tensor) -> Fields:
        assert _has_contiguous_rows(tensor), f"a matrix cannot be written: its strides are {tensor.stride()}"
        return tensor, tensor.stride(0)


class Scratch:
    """`thread_stride` elements for each thread."""

    data: Address
    thread_stride: int


class AffineInput:
    """relu(scale · values + shift) of values (pixels, channels)."""

    values: Matrix
    channels: int
    scale: Address
    shift: Address

    @staticmethod
    def of(input: interface.AffineInput) -> Fields:
        values = input.values
        return *Matrix.of(values), values.shape[1], input.scale.contiguous(), input.shift.contiguous()


class PackedWeight:
    """A convolution's weight (out_channels, in_channels, taps), scratch for its packed panels, and the address of the
    GEMM that reads them."""

    weight: Address
    panels: Address
    out_channels: int
    in_channels: int
    taps: int
    transposed: int
    gemm: Address

    @staticmethod
    def of(weight: Tensor, panels: Address, transposed: bool, gemm: Address) -> Fields:
        return weight.contiguous(), panels, *conv_sizes(weight.shape), transposed, gemm


class ConvForward:
    """What a 1×1, 3×3 or pooled 1×1 convolution reads, its weight, and its output (pixels, out_channels)."""

    input: AffineInput
    weight: PackedWeight
    output: Matrix


class Statistics:
    """The rows of a matrix of statistics (3, channels), the address of eps in float64, and each thread's partials
    (threads, STATISTICS_ROWS, channels)."""

    partials: Address
    matrix: Matrix
    channels: int
    eps: Address


class NormSums:
    """Σ grad and Σ grad · values (channels,), and each thread's partials (threads, 2, channels) in float64."""

    partials: Address
    grad_sum: Address
    product_sum: Address
    channels: int


class GradWeight:
    """grad_weight, and each thread's split-K partial sums of its transpose (threads, in_channels, padded columns)."""

    partials: Address
    result: Address


class GradAccumulator:
    """grad_accum += grad_scale · grad, or `=` with `overwrite`."""

    grad_scale: Address
    grad_accum: Matrix
    overwrite: int

    @staticmethod
    def of(accumulator: interface.GradAccumulator) -> Fields:
        return accumulator.grad_scale.contiguous(), *Matrix.output(accumulator.grad_accum), accumulator.overwrite


class BatchNormBackward:
    """grad_input = slope · values + constant + grad_scale · grad_accum."""

    values: Matrix
    channels: int
    slope: Address
    constant: Address
    grad_scale: Address
    grad_accum: Matrix

    @staticmethod
    def of(grad: interface.BatchNormBackward) -> Fields:
        values, grad_accum = grad.values, grad.grad_accum
        if grad.sums is None:
            ones = grad_accum.new_ones(values.shape[1])
            coefficients = torch.zeros_like(ones), torch.zeros_like(ones), ones
        else:
            coefficients = grad.coefficients()
        return (
            *Matrix.of(values),
            values.shape[1],
            *(each.contiguous() for each in coefficients),
            *Matrix.of(grad_accum),
        )


class Images:
    """The sides of an image. Those with fewer than three have depth 1, or depth 1 and height 1, and say so: a window of
    a convolution or of pooling does not extend in a dimension that there is not."""

    depth: int
    height: int
    width: int
    has_depth: int
    has_height: int

    @staticmethod
    @functools.lru_cache(maxsize=REMEMBERED_SIZES)
    def of(shape: torch.Size) -> Fields:
        return *(1,) * (4 - len(shape)), *shape[1:], len(shape) > 3, len(shape) > 2


class ConvBackward:
    """What the backward of every convolution reads and writes. `grad_weight` is absent where it is not needed."""

    input: AffineInput
    weight: PackedWeight
    accumulator: GradAccumulator
    sums: NormSums
    grad_weight: GradWeight | None


class BatchStatisticsArguments:
    openmp: OpenMP
    rows: int
    tile: int
    values: Matrix
    statistics: Statistics


class BatchNormGradInputArguments:
    openmp: OpenMP
    rows: int
    grad: BatchNormBackward
    grad_input: Matrix


class AffineBackwardArguments:
    openmp: OpenMP
    rows: int
    tile: int
    grad_output: Matrix
    values: Matrix
    accumulator: GradAccumulator
    sums: NormSums


class Conv1x1ForwardArguments:
    """`statistics` of the output are optional."""

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    conv: ConvForward
    statistics: Statistics | None


class Conv1x1BackwardArguments:
    """`next_bottleneck` is optional."""

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    conv: ConvBackward
    grad_output: BatchNormBackward
    next_bottleneck: ConvForward | None


class Conv3x3ForwardArguments:
    """`halo` rows before and after its own are what a thread's output depends on. `statistics` are optional."""

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    images: Images
    dilation: int
    halo: int
    conv: ConvForward
    statistics: Statistics | None


class Conv3x3BackwardArguments:
    """grad_output is contiguous."""

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    images: Images
    dilation: int
    conv: ConvBackward
    grad_output: Address


class PooledConv1x1ForwardArguments:
    """`rows` are those of the output; `images` and `window` (of how many pixels an average is) belong to the input."""

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    images: Images
    window: int
    conv: ConvForward


class PooledConv1x1BackwardArguments:
    """The weight is already divided by the window's number of pixels. grad_output is contiguous."""

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    images: Images
    window: int
    conv: ConvBackward
    grad_output: Address


@functools.lru_cache(maxsize=REMEMBERED_SIZES)
def conv_sizes(weight_shape: torch.Size) -> tuple[int, int, int]:
    """The out_channels, in_channels and taps of a convolution's weight."""
    out_channels, in_channels, *kernel_size = weight_shape
    return out_channels, in_channels, math.prod(kernel_size)


def record_dtype(arguments: type, dtype: np.dtype) -> np.dtype:
    """The record as a kernel for matrices of this dtype reads it."""
    return np.dtype([*_fields(arguments), ("zero", dtype)])


def packer(arguments: type) -> Callable[..., bytes]:
    """What turns the record's integers into its bytes. `zero` is 0 in every dtype, and of at most eight bytes."""
    return struct.Struct(f"{_num_fields(arguments)}q8x").pack


@functools.cache
def absent(group: type) -> Fields:
    return (0,) * _num_fields(group)


def _num_fields(group: type) -> int:
    return np.dtype(_fields(group)).itemsize // 8


def _fields(group: type) -> list[tuple[str, np.dtype]]:
    return [(name, _field_dtype(hint)) for name, hint in typing.get_type_hints(group).items()]


def _field_dtype(hint: typing.Any) -> np.dtype:
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]  # the other one is None
    return np.dtype(np.int64 if hint is int else _fields(hint))


def _has_contiguous_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 or matrix.shape[1] == 1
