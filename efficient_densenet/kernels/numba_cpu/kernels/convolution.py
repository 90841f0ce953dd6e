"""Functions for the kernels of 1×1, 3×3 and pooled convolutions: products of a tile, and the gradient of the weight."""

from ..compiler.intrinsics import call_subroutine, compiled, inlined, pointer
from .memory import (
    cells,
    clear,
    convert,
    elements,
    interleave_rows,
    is_narrow,
    offset,
    panel_columns,
    stride_of,
    vnni_factor,
)
from .threads import partition

OVERWRITE, ACCUMULATE = 0, 1

_TRANSPOSE_BLOCK = 16
"""The number of a weight's input channels whose gradient is transposed at once, for all taps, in the L1 cache."""


@inlined
def conv1x1_product(conv, start, stop, activation, buffer, zero):
    """Rows start to stop of the output (pixels, out_channels) = activation (rows, in_channels) @ weight.T.

    If the output is narrow, the product is computed in `buffer` (rows, padded columns) and then rounded.
    """
    channels, width, narrow = conv.weight.in_channels, conv.weight.out_channels, is_narrow(conv.output.element, zero)
    operand = conv.weight.operand
    output, stride = offset(conv.output.data, start * conv.output.row_stride, zero), conv.output.row_stride
    if narrow:
        output, stride = buffer, stride_of(width, zero)
    a_row = stride_of(channels, operand) // vnni_factor(operand, zero)
    size = stop - start, width, cells(channels, operand, zero)
    operands = activation, a_row, 1, conv.weight.panels, 0, OVERWRITE, output, stride
    call_subroutine(conv.weight.gemm, (*size, *operands, zero))
    if narrow:
        for row in range(start, stop):
            rounded = offset(conv.output.data, row * conv.output.row_stride, conv.output.element)
            convert(offset(buffer, (row - start) * stride, zero), zero, rounded, conv.output.element, width)


@inlined
def conv3x3_product(weight, rows, activation, output, columns, zero):
    """output (rows, taps · out_channels) = activation (rows, in_channels) @ weight, padded to whole panels."""
    channels, operand = weight.in_channels, weight.operand
    a_row = stride_of(channels, operand) // vnni_factor(operand, zero)
    operands = activation, a_row, 1, weight.panels, 0, OVERWRITE, output, columns
    call_subroutine(weight.gemm, (rows, columns, cells(channels, operand, zero), *operands, zero))


@compiled
def weight_columns(weight, zero):
    """taps · out_channels, padded to whole panels."""
    return panel_columns(weight.taps * weight.out_channels, zero)


@inlined
def grad_activation(weight, rows, grad, stride, output, zero):
    """output (rows, in_channels) = grad (rows, taps · out_channels) @ transposed weight. Returns output's row stride.
    grad's row stride counts operands.

    The kernels pass the activation's memory as output: it is not read again, and a tile needs less of the cache.
    """
    columns, operand = panel_columns(weight.in_channels, zero), weight.operand
    output_stride, a_row = stride_of(columns, zero), stride // vnni_factor(operand, zero)
    size = rows, columns, cells(weight.taps * weight.out_channels, operand, zero)
    call_subroutine(weight.gemm, (*size, grad, a_row, 1, weight.panels, 0, OVERWRITE, output, output_stride, zero))
    return output_stride


@inlined
def add_grad_weight(conv, thread, tile, rows, activation, grad, stride, is_first, zero):
    """The thread's split-K partial sum of grad_weight's transpose: += activation.T @ grad, over the rows of a tile, or
    `=` for the first tile.

    (in_channels, rows) @ (rows, taps · out_channels) is tall rather than wide, which processors multiply faster. If a
    cell is two operands, two rows are interleaved into it first, in memory after the `tile` rows of each matrix.
    """
    channels, columns, operand = conv.input.channels, weight_columns(conv.weight, zero), conv.weight.operand
    a, a_stride, b, b_stride = activation, stride_of(channels, operand), grad, stride
    if is_narrow(operand, zero):
        a, b = offset(a, tile * a_stride, operand), offset(b, tile * b_stride, operand)
        interleave_rows(activation, rows, a_stride, channels, a, stride_of(channels, zero), operand)
        interleave_rows(grad, rows, stride, columns, b, stride_of(columns, zero), operand)
        a_stride, b_stride = stride_of(channels, zero), stride_of(columns, zero)
    partials = offset(conv.grad_weight.partials, thread * channels * columns, zero)
    operands = a, 1, a_stride, b, b_stride, OVERWRITE if is_first else ACCUMULATE, partials, columns
    call_subroutine(conv.weight.gemm, (channels, columns, cells(rows, operand, zero), *operands, zero))


@compiled
def clear_grad_weight(conv, thread, zero):
    count = conv.input.channels * weight_columns(conv.weight, zero)
    clear(offset(conv.grad_weight.partials, thread * count, zero), count, zero)


@compiled
def reduce_grad_weight(conv, thread, threads, zero):
    """grad_weight (out_channels, in_channels, taps), transposed by blocks; each thread has some of the input channels.

    The taps are in reverse order, since im2col of grad_output gathers the outputs to which each pixel has contributed.
    """
    channels, width, taps = conv.input.channels, conv.weight.out_channels, conv.weight.taps
    columns = weight_columns(conv.weight, zero)
    result = pointer(conv.grad_weight.result, 0, zero)
    first, last = partition(channels, thread, threads)
    for start in range(first, last, _TRANSPOSE_BLOCK):
        count = min(_TRANSPOSE_BLOCK, last - start)
        total = elements(conv.grad_weight.partials, start * columns, count * columns, zero)
        for i in range(1, threads):
            partial = elements(conv.grad_weight.partials, (i * channels + start) * columns, count * columns, zero)
            for j in range(count * columns):
                total[j] += partial[j]
        sums = pointer(conv.grad_weight.partials, start * columns, zero)
        for o in range(width):
            for k in range(taps):
                to = (o * channels + start + 1) * taps - 1 - k
                for c in range(count):
                    # In the plain convolution, values that are not finite meet zeros of the padding: NaN in every tap.
                    padding = sums[c * columns + taps // 2 * width + o] * zero if taps > 1 else zero
                    result[to + c * taps] = sums[c * columns + k * width + o] + padding
