"""The arguments of each kernel: a record for each, made of groups that several kernels share.

Records and their groups are written here as annotated classes. A kernel reads them as a NumPy structured dtype: an
integer or an `Address` is an int64, a group is a nested record, all zeros where it is absent. The last field is `zero`,
the 0 of the dtype of the kernel's arithmetic. An `Element` takes no memory: its dtype is the dtype of the group's
elements, which may be narrower. The dtype of an `Operand` is the dtype of a product's operands.

The host writes a record as one flat tuple of `Fields`, integers and tensors. The kernel gets the tensors' addresses,
and the tuple keeps the tensors alive. Some are copies: an input whose layout a kernel cannot read is copied. An output
must have the right layout.
"""

import math

import torch
from torch import Tensor

from ..._tensors import as_dtype
from .. import interface
from .compiler.records import Element, Operand

Address = int


class Within:
    """An address some bytes after the start of a tensor."""

    def __init__(self, tensor: Tensor, offset: int) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset: int) -> "Within":
        return Within(self.tensor, self.offset + offset)

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() + self.offset


Fields = tuple[int | Tensor | Within, ...]
"""The values that the host writes for a group: integers and, for each address, a tensor, a place within a tensor, or
the address itself, if it stays the same for the life of the process."""


class OpenMP:
    """Addresses of functions, from `openmp.functions`."""

    thread_number: Address
    num_threads: Address
    barrier: Address


class Matrix:
    """(pixels, channels); every row is contiguous, row_stride counts elements.

    Matrices of statistics and of sums are in the dtype of the arithmetic, whatever `element` says.
    """

    data: Address
    row_stride: int
    element: Element

    @staticmethod
    def of(tensor: Tensor) -> Fields:
        row_stride, channel_stride = tensor.stride()
        if channel_stride == 1 or tensor.shape[1] == 1:
            return tensor, row_stride
        tensor = tensor.contiguous()
        return tensor, tensor.stride(0)

    @staticmethod
    def output(tensor: Tensor) -> Fields:
        return tensor, tensor.stride(0)


class ContiguousMatrix:
    """(pixels, channels)."""

    data: Address
    element: Element


class Scratch:
    """`thread_stride` elements for each thread."""

    data: Address
    thread_stride: int


class Norm:
    """Vectors (channels,) of a batch norm, all in the dtype of the arithmetic; `mean` is absent where the values are
    stored centered."""

    weight: Address
    bias: Address
    inv_std: Address
    mean: Address | None

    @staticmethod
    def of(norm: interface.BatchNormAffine) -> Fields:
        mean, dtype = 0 if norm.mean is None else norm.mean.contiguous(), norm.inv_std.dtype
        parameters = as_dtype(norm.weight, dtype).contiguous(), as_dtype(norm.bias, dtype).contiguous()
        return *parameters, norm.inv_std.contiguous(), mean


class ActivationRecord:
    """Addresses of the subroutines with the activation's formulas and of its two constants, in the dtype of the
    arithmetic. It is absent for a ReLU."""

    formula: Address
    derivative: Address
    constants: Address


class AffineInputRecord:
    """f(scale · values + shift) of values (pixels, channels). The kernel computes scale and shift, (channels,) each,
    into scratch."""

    values: Matrix
    channels: int
    norm: Norm
    scale: Address
    shift: Address
    activation: ActivationRecord | None

    @staticmethod
    def of(input: interface.AffineInput, vectors: Within, activation: Fields) -> Fields:
        """`vectors` is scratch for scale and shift."""
        values, norm, *_ = input
        channels = values.shape[1]
        scratch = vectors, vectors + channels * norm.inv_std.itemsize
        return *Matrix.of(values), channels, *Norm.of(norm), *scratch, *activation


class PackedWeight:
    """A convolution's weight (out_channels, in_channels, taps), scratch for its packed panels of operands, and the
    address of the GEMM that reads them."""

    weight: Address
    panels: Address
    out_channels: int
    in_channels: int
    taps: int
    transposed: int
    gemm: Address
    element: Element
    operand: Operand

    @staticmethod
    def of(weight: Tensor, panels: Within, transposed: bool, gemm: Address) -> Fields:
        return weight.contiguous(), panels, *conv_sizes(weight), transposed, gemm


class ConvForward:
    """The input of a 1×1, 3×3 or pooled 1×1 convolution, its weight, and its output (pixels, out_channels)."""

    input: AffineInputRecord
    weight: PackedWeight
    output: Matrix


class Statistics:
    """The rows of a matrix of statistics (3, channels), the address of eps in float64, and each thread's partials
    (threads, STATISTICS_ROWS, channels)."""

    partials: Address
    matrix: Matrix
    channels: int
    eps: Address


class NormGradients:
    """grad_bias and grad_weight of a norm (channels,), the `sums` (2, channels) to which they are added times γ, unless
    absent, and each thread's partials of Σ grad and Σ grad · values (threads, 2, channels) in float64."""

    partials: Address
    grad_bias: Address
    grad_weight: Address
    channels: int
    norm: Norm
    sums: Matrix | None

    @staticmethod
    def of(
        grads: interface.Gradients, sums: Tensor | None, norm: interface.BatchNormAffine, partials: Within
    ) -> Fields:
        matrix = (0, 0) if sums is None else Matrix.output(sums)
        return partials, grads.norm_bias, grads.norm_weight, norm.inv_std.shape[0], *Norm.of(norm), *matrix


class GradWeight:
    """grad_weight, and each thread's split-K partial sums of its transpose (threads, in_channels, padded columns)."""

    partials: Address
    result: Address


class GradAccumulatorRecord:
    """grad_accum += grad_scale · grad, or `=` with `overwrite`."""

    grad_scale: Address
    grad_accum: Matrix
    overwrite: int

    @staticmethod
    def of(
        accumulator: interface.GradAccumulator, norm: interface.BatchNormAffine, scale: Within | Tensor | int
    ) -> Fields:
        """`scale` is the norm's scale, which is read for a frozen norm only."""
        grad_scale = scale if norm.frozen else as_dtype(norm.weight, norm.inv_std.dtype).contiguous()
        return grad_scale, *Matrix.output(accumulator.grad_accum), accumulator.overwrite


class BatchNormBackwardRecord:
    """grad_input = slope · values + constant + inv_std · grad_accum, or grad_accum alone where there are no `sums`.

    The kernel computes slope and constant into scratch, from `sums` (2, channels) over `count` rows.
    """

    values: Matrix
    channels: int
    inv_std: Address
    mean: Address | None
    sums: Matrix | None
    count: int
    slope: Address
    constant: Address
    grad_accum: Matrix

    @staticmethod
    def of(grad: interface.BatchNormBackward, vectors: Within) -> Fields:
        """`vectors` is scratch for slope and constant."""
        values, inv_std, sums = grad.values, grad.inv_std, grad.sums
        channels, itemsize = values.shape[1], values.itemsize
        if inv_std is None or sums is None:
            norm = 0, 0, 0, 0
        else:
            itemsize = inv_std.itemsize
            norm = inv_std.contiguous(), 0 if grad.mean is None else grad.mean.contiguous(), *Matrix.of(sums)
        scratch = vectors, vectors + channels * itemsize
        return *Matrix.of(values), channels, *norm, grad.count, *scratch, *Matrix.of(grad.grad_accum)


class Images:
    """The sides of an image. A missing depth or height is 1, and `has_depth` or `has_height` is False: the window of a
    convolution or a pooling does not extend in that dimension."""

    depth: int
    height: int
    width: int
    has_depth: int
    has_height: int

    @staticmethod
    def of(shape: torch.Size) -> Fields:
        return *(1,) * (4 - len(shape)), *shape[1:], len(shape) > 3, len(shape) > 2


class ConvBackward:
    """The arguments of the backward of every convolution. `grad_weight` is absent where it is not needed."""

    input: AffineInputRecord
    weight: PackedWeight
    accumulator: GradAccumulatorRecord
    gradients: NormGradients
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
    grad: BatchNormBackwardRecord
    grad_input: Matrix


class AffineBackwardArguments:
    openmp: OpenMP
    rows: int
    tile: int
    grad_output: Matrix
    values: Matrix
    accumulator: GradAccumulatorRecord
    gradients: NormGradients


class ConvForwardArguments:
    """`images` are absent for a 1×1 convolution without pooling. `rows` counts the output's rows, `window` the pixels
    that each of them averages, 1 without pooling. A row of a 3×3 convolution's output also depends on `halo` rows
    before and after it. `statistics` of the output are optional.
    """

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    images: Images | None
    dilation: int
    window: int
    halo: int
    conv: ConvForward
    statistics: Statistics | None


class ConvBackwardArguments:
    """A 3×3 or a pooled 1×1 convolution has `images` and `grad_output`. A 1×1 convolution has the `batch_norm` after it
    instead, and may have a `next_bottleneck`.

    `rows` counts the output's rows, `window` the pixels that each of them averages, 1 without pooling. The weight is
    already divided by it.
    """

    openmp: OpenMP
    rows: int
    tile: int
    scratch: Scratch
    images: Images | None
    dilation: int
    window: int
    conv: ConvBackward
    grad_output: ContiguousMatrix | None
    batch_norm: BatchNormBackwardRecord | None
    next_bottleneck: ConvForward | None


def conv_sizes(weight: Tensor) -> tuple[int, int, int]:
    """The out_channels, in_channels and taps of a convolution's weight."""
    out_channels, in_channels, *kernel_size = weight.shape
    return out_channels, in_channels, math.prod(kernel_size)
