"""`interface.Kernels` for CPUs: what `portable` does in fewer passes, by kernels that Numba compiles.

Each operation is one parallel region of PyTorch's own OpenMP threads. What is rare (mixed precisions, very large
weights) or memory-bound in one pass (`affine_forward`) is left to `portable`.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import portable, scratch
from ..interface import AffineInput, BatchNormBackward, Conv1x1, ConvGradients, GradAccumulator, NormSums, Statistics
from ..portable import halved
from . import arguments, kernels, openmp
from .compilation import Kernel, compile_kernel
from .gemm import TILE_MULTIPLE, gemm
from .memory import padded_stride, whole_panels
from .statistics import STATISTICS_ROWS

affine_forward = portable.affine_forward

TILE = 192
"""Rows: enough of them for a good matrix product, few enough for the caches."""

TILE_BYTES = 1 << 21
"""The most that a tile's scratch may take, unless a quarter of its rows take more."""

WEIGHT_BYTES = 3 << 19
"""The largest weight. A larger one is evicted from the nearest caches between tiles, of which portable makes fewer."""


def batch_statistics(values: Tensor) -> Statistics:
    values = values if values.stride(1) == 1 else values.contiguous()
    tiles = _tiles(values)
    statistics = _statistics(values, values.shape[1])
    record = arguments.BatchStatisticsArguments(_openmp(), len(values), tiles.rows, values, statistics)
    _run(kernels.batch_statistics, record, values.dtype, tiles.threads)
    mean, variance = statistics.result.unbind()
    return mean, variance


def batch_norm_grad_input(grad: BatchNormBackward) -> Tensor:
    values = grad.input.values
    grad_input = torch.empty_like(values, memory_format=torch.contiguous_format)
    record = arguments.BatchNormGradInputArguments(_openmp(), len(values), _batch_norm_backward(grad), grad_input)
    _run(kernels.batch_norm_grad_input, record, values.dtype, _threads(values))
    return grad_input


def affine_backward(grad_output: Tensor, input: AffineInput, accumulator: GradAccumulator) -> NormSums:
    values = input.values
    if not grad_output.dtype == values.dtype == input.scale.dtype:
        return portable.affine_backward(grad_output, input, accumulator)
    tiles, sums = _tiles(values, _padded(values.shape[1], values)), _norm_sums(input)
    record = arguments.AffineBackwardArguments(
        *(_openmp(), len(values), tiles.rows),
        *(grad_output, values, arguments.GradAccumulator(*accumulator[:3]), sums),
    )
    _run(kernels.affine_backward, record, values.dtype, tiles.threads)
    grad_sum, product_sum = sums.result.unbind()
    return grad_sum, product_sum


def conv1x1_forward(conv: Conv1x1) -> None:
    if not _supported(conv.input, conv.weight):
        return portable.conv1x1_forward(conv)
    return _conv1x1(conv, None)


def conv1x1_forward_with_statistics(conv: Conv1x1) -> Statistics:
    if not _supported(conv.input, conv.weight):
        return portable.conv1x1_forward_with_statistics(conv)
    statistics = _statistics(conv.output, conv.weight.shape[0])
    _conv1x1(conv, statistics)
    mean, variance = statistics.result.unbind()
    return mean, variance


def _conv1x1(conv: Conv1x1, statistics: arguments.Statistics | None) -> None:
    values = conv.input.values
    tiles = _tiles(values, _padded(values.shape[1], values))
    record = arguments.Conv1x1ForwardArguments(
        *(_openmp(), len(values), tiles.rows, tiles.scratch()),
        *(_conv(*conv), statistics),
    )
    _run(kernels.conv1x1_forward, record, values.dtype, tiles.threads)


def conv1x1_backward(
    grad_output: BatchNormBackward,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    next_bottleneck: Conv1x1 | None = None,
) -> ConvGradients:
    if not _supported(input, weight):
        return portable.conv1x1_backward(grad_output, input, weight, accumulator, next_bottleneck)
    tiles, conv = _conv_backward(input, weight, accumulator)
    record = arguments.Conv1x1BackwardArguments(
        *(_openmp(), len(input.values), tiles.rows, tiles.scratch(), conv),
        *(_batch_norm_backward(grad_output), next_bottleneck and _conv(*next_bottleneck)),
    )
    _run(kernels.conv1x1_backward, record, weight.dtype, tiles.threads)
    return _gradients(conv)


def conv3x3_forward(input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1) -> Tensor:
    if not _supported(input, weight):
        return portable.conv3x3_forward(input, weight, shape, dilation)
    return _conv3x3(input, weight, shape, dilation, None)


def conv3x3_forward_with_statistics(
    input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    if not _supported(input, weight):
        return portable.conv3x3_forward_with_statistics(input, weight, shape, dilation)
    statistics = _statistics(input.values, weight.shape[0])
    output = _conv3x3(input, weight, shape, dilation, statistics)
    mean, variance = statistics.result.unbind()
    return output, mean, variance


def _conv3x3(
    input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int, statistics: arguments.Statistics | None
) -> Tensor:
    values = input.values
    output = values.new_empty(len(values), weight.shape[0])
    columns = whole_panels(weight.numel() // weight.shape[1], weight.itemsize)  # taps · out_channels
    # the distance of the farthest tap: a pixel, a row of pixels and a plane
    halo = dilation * (1 + sum(shape[1:][-i:].numel() for i in range(1, len(shape) - 1)))
    tiles = _tiles(values, _padded(values.shape[1], values) + columns, halo=halo, columns=columns)
    record = arguments.Conv3x3ForwardArguments(
        *(_openmp(), len(values), tiles.rows, tiles.scratch(), _images(shape), dilation, halo),
        *(_conv(input, weight, output), statistics),
    )
    _run(kernels.conv3x3_forward, record, values.dtype, tiles.threads)
    return output


def conv3x3_backward(
    grad_output: Tensor,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    shape: torch.Size,
    dilation: int = 1,
) -> ConvGradients:
    if not _supported(input, weight):
        return portable.conv3x3_backward(grad_output, input, weight, accumulator, shape, dilation)
    tiles, conv = _conv_backward(input, weight, accumulator)
    record = arguments.Conv3x3BackwardArguments(
        *(_openmp(), len(input.values), tiles.rows, tiles.scratch(), _images(shape), dilation),
        *(conv, grad_output),
    )
    _run(kernels.conv3x3_backward, record, weight.dtype, tiles.threads)
    return _gradients(conv)


def pooled_conv1x1_forward(input: AffineInput, weight: Tensor, shape: torch.Size) -> Tensor:
    if not _supported(input, weight):
        return portable.pooled_conv1x1_forward(input, weight, shape)
    values, window = input.values, 2 ** len(shape[1:])
    output = values.new_empty(halved(shape).numel(), weight.shape[0])
    tiles = _tiles(values, _padded(values.shape[1], values), window)
    record = arguments.PooledConv1x1ForwardArguments(
        *(_openmp(), len(output), tiles.rows, tiles.scratch(), _images(shape), window),
        _conv(input, weight, output),
    )
    _run(kernels.pooled_conv1x1_forward, record, values.dtype, tiles.threads)
    return output


def pooled_conv1x1_backward(
    grad_output: Tensor, input: AffineInput, weight: Tensor, accumulator: GradAccumulator, shape: torch.Size
) -> ConvGradients:
    if not _supported(input, weight):
        return portable.pooled_conv1x1_backward(grad_output, input, weight, accumulator, shape)
    if accumulator.overwrite and any(side % 2 for side in shape[1:]):
        accumulator.grad_accum.zero_()  # the last pixels of an odd side are in no window
    window = 2 ** len(shape[1:])
    tiles, conv = _conv_backward(input, weight / window, accumulator, window)
    record = arguments.PooledConv1x1BackwardArguments(
        *(_openmp(), len(grad_output), tiles.rows, tiles.scratch(), _images(shape), window),
        *(conv, grad_output),
    )
    _run(kernels.pooled_conv1x1_backward, record, weight.dtype, tiles.threads)
    return _gradients(conv)


class _Tiles(NamedTuple):
    """How many threads run, the rows of their tiles, and the elements of scratch that each thread needs."""

    threads: int
    rows: int
    thread_stride: int
    values: Tensor

    def scratch(self) -> arguments.Scratch:
        size = self.threads * self.thread_stride + TILE_MULTIPLE  # products read up to so many elements beyond
        buffer = scratch.buffer("tile", size, self.values.dtype, self.values.device)
        return arguments.Scratch(buffer, self.thread_stride)


def _tiles(values: Tensor, per_row: int = 0, window: int = 1, halo: int = 0, columns: int = 0) -> _Tiles:
    """Chooses threads, and rows per tile so that `per_row` elements of each row fit the cache.

    With a `window` of pixels, rows are pooled output rows. Two neighboring threads both compute the `halo` rows (of so
    many `columns`) between them: fewer threads run where the halo exceeds a quarter of a thread's rows.
    """
    threads = min(_threads(values), max(1, len(values) // (4 * halo or 1)))
    in_cache = max(TILE // 4, TILE_BYTES // (per_row * values.itemsize or 1))
    rows = min(TILE, in_cache, len(values) // (4 * threads) + 8) // window  # few rows need little scratch
    rows = max(1, -(-rows // TILE_MULTIPLE)) * TILE_MULTIPLE
    return _Tiles(threads, rows, rows * per_row + 2 * halo * columns, values)


def _threads(values: Tensor) -> int:
    """PyTorch's, or fewer, where there are not as many tiles."""
    return max(1, min(torch.get_num_threads(), -(-len(values) // TILE)))


def _run(kernel: Kernel, record: tuple, dtype: torch.dtype, threads: int) -> None:
    packed, _alive = arguments.pack(record)
    openmp.run(_address(kernel, dtype), threads, packed)


def _address(kernel: Kernel, dtype: torch.dtype) -> int:
    """The address of the compiled kernel."""
    address = compile_kernel(kernel, dtype).address
    assert address is not None
    return address


def _supported(input: AffineInput, weight: Tensor) -> bool:
    """Whether all is in one dtype and the weight not too large. The gradient of a single channel is a product with a
    vector, for which PyTorch has a routine that sums more exactly."""
    one_dtype = weight.dtype == input.values.dtype == input.scale.dtype
    return one_dtype and weight.nbytes <= WEIGHT_BYTES and weight.shape[1] > 1


def _padded(columns: int, tensor: Tensor) -> int:
    return padded_stride(columns, tensor.itemsize)


@functools.cache
def _openmp() -> arguments.OpenMP:
    return arguments.OpenMP(**openmp.functions())


def _images(shape: torch.Size) -> arguments.Images:
    depth, height, width = (1,) * (4 - len(shape)) + tuple(shape[1:])
    return arguments.Images(depth, height, width, has_depth=len(shape) > 3, has_height=len(shape) > 2)


def _packed_weight(weight: Tensor, transposed: bool = False) -> arguments.PackedWeight:
    out_channels, in_channels, *kernel_size = weight.shape
    taps = math.prod(kernel_size)
    rows, columns = (taps * out_channels, in_channels) if transposed else (in_channels, taps * out_channels)
    panels = weight.new_empty(rows, whole_panels(columns, weight.itemsize))
    address = _address(gemm, weight.dtype)
    return arguments.PackedWeight(weight, panels, out_channels, in_channels, taps, transposed, address)


def _affine_input(input: AffineInput) -> arguments.AffineInput:
    return arguments.AffineInput(input.values, input.values.shape[1], input.scale, input.shift)


def _conv(input: AffineInput, weight: Tensor, output: Tensor) -> arguments.ConvForward:
    return arguments.ConvForward(_affine_input(input), _packed_weight(weight), output)


def _batch_norm_backward(grad: BatchNormBackward) -> arguments.BatchNormBackward:
    accumulator = grad.accumulator
    return arguments.BatchNormBackward(*_affine_input(grad.input), accumulator.grad_scale, accumulator.grad_accum)


def _statistics(values: Tensor, channels: int) -> arguments.Statistics:
    partials = values.new_empty(_threads(values), STATISTICS_ROWS, channels, dtype=torch.float64)
    return arguments.Statistics(partials, values.new_empty(2, channels), channels)


def _norm_sums(input: AffineInput) -> arguments.NormSums:
    channels = input.values.shape[1]
    partials = input.values.new_empty(_threads(input.values), 2, channels, dtype=torch.float64)
    return arguments.NormSums(partials, input.scale.new_empty(2, channels), channels)


def _conv_backward(
    input: AffineInput, weight: Tensor, accumulator: GradAccumulator, window: int = 1
) -> tuple[_Tiles, arguments.ConvBackward]:
    values, in_channels = input.values, weight.shape[1]
    columns = whole_panels(weight.numel() // in_channels, weight.itemsize)  # taps · out_channels
    grad_weight = None
    if accumulator.needs_grad_weight:
        partials = weight.new_empty(_threads(values), in_channels, columns)
        result = torch.empty_like(weight, memory_format=torch.contiguous_format)
        grad_weight = arguments.GradWeight(partials, result)
    per_row = _padded(columns, weight) + _padded(whole_panels(in_channels, weight.itemsize), weight)
    conv = arguments.ConvBackward(
        *(_affine_input(input), _packed_weight(weight, transposed=True)),
        *(arguments.GradAccumulator(*accumulator[:3]), _norm_sums(input), grad_weight),
    )
    return _tiles(values, per_row, window), conv


def _gradients(conv: arguments.ConvBackward) -> ConvGradients:
    grad_sum, product_sum = conv.sums.result.unbind()
    return conv.grad_weight and conv.grad_weight.result, grad_sum, product_sum
