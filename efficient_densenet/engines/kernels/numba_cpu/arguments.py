"""The arguments of each kernel: a record for each, made of groups that several kernels share.

A record is written here as a NamedTuple of tensors and integers. A kernel reads it as a NumPy structured dtype: an
integer is an int64, an `Array` its address, a `Matrix` the pair (data, row_stride), a group a nested record, all zeros
where it is None. At the end lies `zero`, the 0 of the dtype that the kernel is compiled for.
"""

import enum
import functools
import struct
import types
import typing
from typing import Annotated, NamedTuple

import numpy as np
from torch import Tensor


class Layout(enum.Enum):
    """How a tensor has to lie in memory: an input that does not is copied, an output must."""

    MATRIX = enum.auto()
    OUTPUT_MATRIX = enum.auto()
    ARRAY = enum.auto()
    OUTPUT_ARRAY = enum.auto()


Matrix = Annotated[Tensor, Layout.MATRIX]
"""(pixels, channels); every row is contiguous, row_stride counts elements."""
OutputMatrix = Annotated[Tensor, Layout.OUTPUT_MATRIX]
Array = Annotated[Tensor, Layout.ARRAY]
"""Contiguous."""
OutputArray = Annotated[Tensor, Layout.OUTPUT_ARRAY]


class OpenMP(NamedTuple):
    """Addresses of functions, from `openmp.functions`."""

    thread_number: int
    num_threads: int
    barrier: int


class Scratch(NamedTuple):
    """`thread_stride` elements for each thread."""

    data: OutputArray
    thread_stride: int


class AffineInput(NamedTuple):
    """relu(scale · values + shift) of values (pixels, channels)."""

    values: Matrix
    channels: int
    scale: Array
    shift: Array


class PackedWeight(NamedTuple):
    """A convolution's weight (out_channels, in_channels, taps), a buffer for its packed panels, and the address of the
    GEMM that reads them."""

    weight: Array
    panels: OutputArray
    out_channels: int
    in_channels: int
    taps: int
    transposed: int
    gemm: int


class ConvForward(NamedTuple):
    """What a 1×1, 3×3 or pooled 1×1 convolution reads, its weight, and its output (pixels, out_channels)."""

    input: AffineInput
    weight: PackedWeight
    output: OutputMatrix


class Statistics(NamedTuple):
    """Mean and biased variance (2, channels), and each thread's partials (threads, STATISTICS_ROWS, channels)."""

    partials: OutputArray
    result: OutputArray
    channels: int


class NormSums(NamedTuple):
    """Σ grad and Σ grad · values (2, channels), and each thread's partials (threads, 2, channels) in float64."""

    partials: OutputArray
    result: OutputArray
    channels: int


class GradWeight(NamedTuple):
    """grad_weight, and each thread's split-K partial sums of its transpose (threads, in_channels, padded columns)."""

    partials: OutputArray
    result: OutputArray


class GradAccumulator(NamedTuple):
    """grad_accum += grad_scale · grad, or `=` with `overwrite`."""

    grad_scale: Array
    grad_accum: OutputMatrix
    overwrite: int


class BatchNormBackward(NamedTuple):
    """grad_input = scale · values + shift + grad_scale · grad_accum."""

    values: Matrix
    channels: int
    scale: Array
    shift: Array
    grad_scale: Array
    grad_accum: Matrix


class Images(NamedTuple):
    """The sides of an image. Those with fewer than three have depth 1, or depth 1 and height 1, and say so: a window of
    a convolution or of pooling does not extend in a dimension that there is not."""

    depth: int
    height: int
    width: int
    has_depth: int
    has_height: int


class ConvBackward(NamedTuple):
    """What the backward of every convolution reads and writes. `grad_weight` is None where it is not needed."""

    input: AffineInput
    weight: PackedWeight
    accumulator: GradAccumulator
    sums: NormSums
    grad_weight: GradWeight | None


class BatchStatisticsArguments(NamedTuple):
    openmp: OpenMP
    rows: int
    tile: int
    values: Matrix
    statistics: Statistics


class BatchNormGradInputArguments(NamedTuple):
    openmp: OpenMP
    rows: int
    grad: BatchNormBackward
    grad_input: OutputMatrix


class AffineBackwardArguments(NamedTuple):
    openmp: OpenMP
    rows: int
    tile: int
    grad_output: Matrix
    values: Matrix
    accumulator: GradAccumulator
    sums: NormSums


class Conv1x1ForwardArguments(NamedTuple):
    """`statistics` of the output are optional."""

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    conv: ConvForward
    statistics: Statistics | None


class Conv1x1BackwardArguments(NamedTuple):
    """`next_bottleneck` is optional."""

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    conv: ConvBackward
    grad_output: BatchNormBackward
    next_bottleneck: ConvForward | None


class Conv3x3ForwardArguments(NamedTuple):
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


class Conv3x3BackwardArguments(NamedTuple):
    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    images: Images
    dilation: int
    conv: ConvBackward
    grad_output: Array


class PooledConv1x1ForwardArguments(NamedTuple):
    """`rows` are those of the output; `images` and `window` (of how many pixels an average is) belong to the input."""

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    images: Images
    window: int
    conv: ConvForward


class PooledConv1x1BackwardArguments(NamedTuple):
    """The weight is already divided by the window's number of pixels."""

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    images: Images
    window: int
    conv: ConvBackward
    grad_output: Array


def record_dtype(arguments: type, dtype: np.dtype) -> np.dtype:
    """The record as a kernel for matrices of this dtype reads it."""
    return np.dtype([*((name, _field_dtype(field)) for name, field in _fields(arguments).items()), ("zero", dtype)])


def pack(arguments: tuple) -> tuple[bytes, list[Tensor]]:
    """The record's bytes, and the tensors that must live as long as a kernel reads it."""
    numbers, tensors = [], []
    _append(arguments, type(arguments), numbers, tensors)
    return struct.pack(f"{len(numbers)}q8x", *numbers), tensors


@functools.cache
def _fields(group: type) -> dict[str, type | Layout]:
    """What each field is: int, a tensor's layout or a nested group."""
    return {name: _field(hint) for name, hint in typing.get_type_hints(group, include_extras=True).items()}


class _Packing(NamedTuple):
    """How a field is packed: as `size` integers, of a tensor (a matrix or an array) or of a group of fields."""

    name: str
    field: typing.Any
    is_tensor: bool
    is_matrix: bool
    all_integers: bool
    size: int


@functools.cache
def _packing(group: type) -> list[_Packing]:
    matrices = Layout.MATRIX, Layout.OUTPUT_MATRIX
    return [
        _Packing(
            *(name, field, isinstance(field, Layout), field in matrices),
            all_integers=isinstance(field, type) and field is not int and set(_fields(field).values()) == {int},
            size=_field_dtype(field).itemsize // 8,
        )
        for name, field in _fields(group).items()
    ]


def _field(hint: typing.Any) -> type | Layout:
    if typing.get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    if isinstance(hint, types.UnionType):
        return typing.get_args(hint)[0]  # the other one is None
    return hint


@functools.cache
def _field_dtype(field: type | Layout) -> np.dtype:
    if field in (Layout.MATRIX, Layout.OUTPUT_MATRIX):
        return np.dtype([("data", np.int64), ("row_stride", np.int64)])
    if field is int or isinstance(field, Layout):
        return np.dtype(np.int64)
    return np.dtype([(name, _field_dtype(inner)) for name, inner in _fields(field).items()])


def _append(group: tuple, kind: type, numbers: list[int], tensors: list[Tensor]) -> None:
    for value, (name, field, is_tensor, is_matrix, all_integers, size) in zip(group, _packing(kind), strict=True):
        if field is int:
            numbers.append(value)
        elif is_tensor:
            tensor = _laid_out(name, value, field, is_matrix)
            tensors.append(tensor)
            numbers.append(tensor.data_ptr())
            if is_matrix:
                numbers.append(tensor.stride(-2))
        elif value is None:
            numbers.extend([0] * size)
        elif all_integers:
            numbers.extend(value)
        else:
            _append(value, field, numbers, tensors)


def _laid_out(name: str, tensor: Tensor, layout: Layout, is_matrix: bool) -> Tensor:
    if is_matrix and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1):
        return tensor
    if tensor.is_contiguous():
        return tensor
    is_input = layout in (Layout.MATRIX, Layout.ARRAY)
    assert is_input, f"{name} cannot be written: its strides are {tensor.stride()}"
    return tensor.contiguous()
