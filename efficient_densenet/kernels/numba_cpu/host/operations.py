"""`interface.Kernels` for CPUs: the operations of `portable` in fewer passes, by kernels that Numba compiles.

Matrices are float32, float64 or bfloat16; for bfloat16, arithmetic and the sums of products are float32. Each
operation is one parallel region of PyTorch's own OpenMP threads. `portable` computes rare cases (mixed
precisions, very large weights) and operations that are memory-bound in one pass (`center`, `affine_forward`). An
operation takes all its scratch memory in one call and allocates only its results.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from ... import portable
from ...argument_checks import checked
from ...interface import (
    AffineInput,
    BatchNormBackward,
    Conv1x1,
    GradAccumulator,
    Gradients,
    ImageConv,
    StatisticsOutput,
)
from ...portable import halved
from .. import arguments
from ..arguments import Fields, Within
from ..compiler.compilation import ARITHMETIC, compile_kernel
from ..compiler.records import absent
from ..kernels import kernels
from ..kernels.formulas import FORMULAS, subroutine_of
from . import tiling
from .launch import gemm_address, launch, openmp_functions
from .tiling import Tiles

center, affine_forward = portable.center, portable.affine_forward
arranged_weights = portable.arranged_weights
images_at_once, image_statistics = portable.images_at_once, portable.image_statistics
norm_activation_max_pool = portable.norm_activation_max_pool
norm_activation_max_pool_reduce = portable.norm_activation_max_pool_reduce
norm_activation_max_pool_backward = portable.norm_activation_max_pool_backward

WEIGHT_BYTES = 3 << 19
"""The largest weight. A larger weight would be evicted from the L1 and L2 caches between tiles; portable has fewer
tiles."""


@checked
def batch_statistics(values: Tensor, statistics: StatisticsOutput) -> None:
    tiles = tiling.for_statistics(values)
    memory = new_scratch(tiles, values)
    record = (
        *(*openmp_functions(), len(values), tiles.rows, *arguments.Matrix.of(values)),
        *_statistics(statistics, memory, tiles),
    )
    launch(kernels.batch_statistics, values, tiles.threads, record)


@checked
def batch_norm_grad_input(
    grad: BatchNormBackward, may_overwrite: bool = False, previous: Tensor | None = None
) -> Tensor:
    values = grad.values
    grad_input = torch.empty_like(values, memory_format=torch.contiguous_format) if previous is None else previous
    tiles = tiling.for_grad_input(values)
    memory = new_scratch(tiles, values)
    vectors = Within(memory, tiles.grad_vectors)
    record = (
        *(*openmp_functions(), len(values), *arguments.BatchNormBackwardRecord.of(grad, vectors)),
        *arguments.Matrix.output(grad_input),
    )
    launch(kernels.batch_norm_grad_input, values, tiles.threads, record)
    return grad_input


@checked
def affine_backward(grad_output: Tensor, input: AffineInput, accumulator: GradAccumulator) -> Gradients:
    values = input.values
    if grad_output.dtype != values.dtype or not _has_arithmetic(input, values.dtype):
        return portable.affine_backward(grad_output, input, accumulator)
    tiles = tiling.for_affine_backward(values)
    grads, memory = _new_gradients(input, accumulator), new_scratch(tiles, values)
    scale = input.norm.scale if input.norm.frozen else 0
    record = (
        *(*openmp_functions(), len(values), tiles.rows),
        *(*arguments.Matrix.of(grad_output), *arguments.Matrix.of(values)),
        *arguments.GradAccumulatorRecord.of(accumulator, input.norm, scale),
        *arguments.NormGradients.of(grads, accumulator.sums, input.norm, Within(memory, tiles.partials)),
    )
    launch(kernels.affine_backward, values, tiles.threads, record)
    return grads


@checked
def conv1x1_forward(conv: Conv1x1, statistics: StatisticsOutput | None = None) -> None:
    if _supported(conv.input, conv.weight):
        _conv_forward(*conv, statistics)
    else:
        portable.conv1x1_forward(conv, statistics)


@checked
def conv1x1_backward(
    grad_output: BatchNormBackward,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    next_bottleneck: Conv1x1 | None = None,
) -> Gradients:
    if not _supported(input, weight):
        return portable.conv1x1_backward(grad_output, input, weight, accumulator, next_bottleneck)
    return _conv_backward(grad_output, input, weight, accumulator, next_bottleneck=next_bottleneck)


@checked
def conv3x3_forward(conv: ImageConv, statistics: StatisticsOutput | None = None) -> Tensor:
    input, weight, shape, dilation = conv
    if not _supported(input, weight):
        return portable.conv3x3_forward(conv, statistics)
    output, halo = weight.new_empty(len(input.values), weight.shape[0]), tiling.halo(shape, dilation)
    return _conv_forward(input, weight, output, statistics, arguments.Images.of(shape), dilation, halo=halo)


@checked
def conv3x3_backward(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> Gradients:
    input, weight, shape, dilation = conv
    if not _supported(input, weight):
        return portable.conv3x3_backward(grad_output, conv, accumulator)
    return _conv_backward(grad_output, input, weight, accumulator, arguments.Images.of(shape), dilation)


@checked
def pooled_conv1x1_forward(conv: ImageConv) -> Tensor:
    input, weight, shape, _ = conv
    if not _supported(input, weight):
        return portable.pooled_conv1x1_forward(conv)
    output, window = weight.new_empty(halved(shape).numel(), weight.shape[0]), 2 ** (len(shape) - 1)
    return _conv_forward(input, weight, output, images=arguments.Images.of(shape), window=window)


@checked
def pooled_conv1x1_backward(grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> Gradients:
    input, weight, shape, _ = conv
    if not _supported(input, weight):
        return portable.pooled_conv1x1_backward(grad_output, conv, accumulator)
    if accumulator.overwrite and any(side % 2 for side in shape[1:]):
        accumulator.grad_accum.zero_()  # the last pixels of an odd side are in no window
    window = 2 ** (len(shape) - 1)
    return _conv_backward(grad_output, input, weight / window, accumulator, arguments.Images.of(shape), window=window)


def _conv_forward(
    input: AffineInput,
    weight: Tensor,
    output: Tensor,
    statistics: StatisticsOutput | None = None,
    images: Fields | None = None,
    dilation: int = 1,
    window: int = 1,
    halo: int = 0,
) -> Tensor:
    """The forward of any convolution; the arguments are explained in `arguments.ConvForwardArguments`."""
    tiles = tiling.for_forward(len(input.values), weight, statistics is not None, window, halo)
    memory = new_scratch(tiles, weight)
    record = (
        *(*openmp_functions(), len(output), tiles.rows, memory, tiles.thread_stride),
        *(*(images or absent(arguments.Images)), dilation, window, halo),
        *(*_conv(input, weight, output, memory, tiles), *_statistics(statistics, memory, tiles)),
    )
    launch(kernels.conv3x3_forward if halo else kernels.conv1x1_forward, weight, tiles.threads, record)
    return output


def _conv_backward(
    grad_output: BatchNormBackward | Tensor,
    input: AffineInput,
    weight: Tensor,
    accumulator: GradAccumulator,
    images: Fields | None = None,
    dilation: int = 1,
    window: int = 1,
    next_bottleneck: Conv1x1 | None = None,
) -> Gradients:
    """The backward of any convolution; the arguments are explained in `arguments.ConvBackwardArguments`."""
    next_weight = None if next_bottleneck is None else next_bottleneck.weight
    tiles = tiling.for_backward(len(input.values), weight, accumulator.needs_grad_weight, window, next_weight)
    grads, memory = _new_gradients(input, accumulator, weight), new_scratch(tiles, weight)
    start, grad_weight = Within(memory, 0), grads.conv_weight
    if isinstance(grad_output, Tensor):
        rows, output, norm = len(grad_output), grad_output.contiguous(), absent(arguments.BatchNormBackwardRecord)
    else:
        norm = arguments.BatchNormBackwardRecord.of(grad_output, start + tiles.grad_vectors)
        rows, output = len(input.values), 0
    next_conv = next_bottleneck and _conv(*next_bottleneck, memory, tiles, is_next=True)
    record = (
        *(*openmp_functions(), rows, tiles.rows, memory, tiles.thread_stride),
        *(*(images or absent(arguments.Images)), dilation, window),
        *arguments.AffineInputRecord.of(input, start + tiles.vectors, _activation(input, weight.dtype)),
        *arguments.PackedWeight.of(weight, start + tiles.panels, True, gemm_address(weight)),
        *arguments.GradAccumulatorRecord.of(accumulator, input.norm, start + tiles.vectors),
        *arguments.NormGradients.of(grads, accumulator.sums, input.norm, start + tiles.partials),
        *(absent(arguments.GradWeight) if grad_weight is None else (start + tiles.grad_weight, grad_weight)),
        *(output, *norm, *(next_conv or absent(arguments.ConvForward))),
    )
    launch(kernels.conv_backward, weight, tiles.threads, record)
    return grads


def _supported(input: AffineInput, weight: Tensor) -> bool:
    """Whether all matrices are in one dtype, and the weight is not too large and has several input channels.

    The gradient of a single channel is a product with a vector, for which PyTorch's routine is more accurate.
    """
    one_dtype = weight.dtype == input.values.dtype and _has_arithmetic(input, weight.dtype)
    return one_dtype and weight.numel() * input.dtype.itemsize <= WEIGHT_BYTES and weight.shape[1] > 1


def _has_arithmetic(input: AffineInput, dtype: torch.dtype) -> bool:
    """Whether the input's dtypes are as in kernels for matrices of this dtype. A norm's parameters may have either
    dtype."""
    arithmetic, norm = ARITHMETIC.get(dtype), input.norm
    return (
        input.dtype == arithmetic and norm.weight.dtype == norm.bias.dtype and norm.weight.dtype in (arithmetic, dtype)
    )


def new_scratch(tiles: Tiles, like: Tensor) -> Tensor:
    """Memory for all temporaries of a kernel for matrices like this one; the caller keeps it alive while the kernel
    runs."""
    dtype = ARITHMETIC[like.dtype]
    return torch.empty(tiles.scratch_bytes // dtype.itemsize, dtype=dtype, device=like.device)


def _new_gradients(input: AffineInput, accumulator: GradAccumulator, weight: Tensor | None = None) -> Gradients:
    """Uninitialized gradients; the convolution's grad_weight is in the dtype of the arithmetic, as in portable."""
    norm_weight, norm_bias = torch.empty_like(input.norm.inv_std), torch.empty_like(input.norm.inv_std)
    if weight is None:
        return Gradients(norm_weight, norm_bias)
    conv_weight, dtype = None, ARITHMETIC[weight.dtype]
    if accumulator.needs_grad_weight:
        conv_weight = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    return Gradients(norm_weight, norm_bias, conv_weight)


def _statistics(statistics: StatisticsOutput | None, memory: Tensor, tiles: Tiles) -> Fields:
    if statistics is None:
        return absent(arguments.Statistics)
    matrix, eps = statistics.matrix, statistics.eps
    return Within(memory, tiles.partials), *arguments.Matrix.output(matrix), matrix.shape[1], _numbers((eps,))[0]


@functools.cache
def _numbers(numbers: tuple[float, ...], dtype: torch.dtype = torch.float64) -> tuple[int, np.ndarray]:
    """The address from which a kernel reads floating-point numbers, and the array there, which must be kept alive."""
    memory = np.array(numbers, str(dtype).removeprefix("torch."))
    return memory.ctypes.data, memory


def _conv(
    input: AffineInput, weight: Tensor, output: Tensor, memory: Tensor, tiles: Tiles, is_next: bool = False
) -> Fields:
    start = Within(memory, 0)
    vectors, panels = (tiles.next_vectors, tiles.next_panels) if is_next else (tiles.vectors, tiles.panels)
    return (
        *arguments.AffineInputRecord.of(input, start + vectors, _activation(input, weight.dtype)),
        *arguments.PackedWeight.of(weight, start + panels, False, gemm_address(weight)),
        *arguments.Matrix.output(output),
    )


def _activation(input: AffineInput, dtype: torch.dtype) -> Fields:
    activation = input.activation
    if activation.is_relu or input.values.is_meta:
        return absent(arguments.ActivationRecord)
    return *_formulas(activation.name, dtype), _numbers(activation[1:], input.dtype)[0]


@functools.cache
def _formulas(name: str, dtype: torch.dtype) -> Fields:
    """The addresses of the activation's formula and of its derivative."""
    arithmetic = ARITHMETIC[dtype]
    return tuple(compile_kernel(subroutine_of(name, each, arithmetic), arithmetic) for each in FORMULAS)
