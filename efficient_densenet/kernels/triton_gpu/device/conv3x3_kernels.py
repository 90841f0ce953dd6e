"""The 3×3 convolution of f(batch norm) for an activation f, forward and backward. `conv3x3` launches the kernels.

Layout and grids are as in `kernels`. A row is a pixel of an image of height × width pixels; taps are (dy, dx) in
{−1, 0, 1}², times the dilation. Weights are [out_channels, 9 taps, channels], as in channels_last memory. The norm's
affine map and the activation are the prologue of every product, so that the activation exists a tile at a time. The
activation is zero outside the image.

Forward (an implicit GEMM): the values have several times as many channels as the output, so a tile of them is loaded
three times rather than nine, once for each dy, and multiplied by the weights of all three dx. Each dx has its own
accumulator, and the epilogue adds them up: output[x] = left[x − dilation] + center[x] + right[x + dilation]. For that,
tiles overlap by the dilation at both ends.

Backward: two kernels, each of which loops over one product. A fused kernel, which reads the values once for both, was
compiled for sixteen tile shapes: its operands and accumulators took 200 to 255 registers, and most shapes spilled.
"""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl

from .device_functions import (
    SIZES,
    VECTORS,
    accumulate,
    divisible,
    load_affine,
    load_vector,
    offsets,
    store_pair,
)
from .formulas import activate, grad_before_activation
from .operands import as_operand
from .statistics_kernels import store_tile_statistics

SIZES_3X3 = [*SIZES, "dilation", "output_stride", "grad_output_stride"]


@triton.jit
def load_activation(
    values, row, stride, channel, mask, scale, shift, ACTIVATION: tl.constexpr, A: tl.constexpr, B: tl.constexpr
):
    """f(z), zero outside the mask; z = scale · values + shift; and the values."""
    x = tl.load(values + offsets(row, stride, channel), mask, 0.0).to(tl.float32)
    z = x * scale + shift
    return tl.where(mask, activate(z, ACTIVATION, A, B), 0.0), z, x


@triton.jit
def add_tap(total, activation, weight, PRECISION: tl.constexpr):
    """total + activation @ weight.T"""
    w = as_operand(weight, weight, PRECISION)
    return tl.dot(activation, tl.trans(w), total, input_precision=PRECISION)


@triton.jit
def shifted_rows(matrix, position, mask, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """matrix[position], zero where the mask is False."""
    index = tl.minimum(tl.maximum(position, 0), BLOCK_ROWS - 1)[:, None]
    shifted = tl.gather(matrix, tl.broadcast_to(index, (BLOCK_ROWS, BLOCK_OUT)), 0)
    return tl.where(mask[:, None], shifted, 0.0)


@triton.jit(do_not_specialize=SIZES_3X3, do_not_specialize_on_alignment=VECTORS)
def conv3x3_forward(
    output,
    stats,
    values,
    norm_weight,
    norm_bias,
    mean,
    inv_std,
    weight,
    num_rows,
    channels,
    height,
    width,
    dilation,
    values_stride,
    output_stride,
    OUT_CHANNELS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    DIVISIBILITY: tl.constexpr,
    OUT_DIVISIBILITY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """output[num_rows, out_channels] = conv3x3(f(batch_norm(values)), weight), padding = dilation.

    stats[row tiles, 2, out_channels]: mean and M2 of each tile as it is stored. A tile of BLOCK_ROWS rows does not
    write the `dilation` rows at either end. Grid: (row tiles, out tiles).
    """
    channels, values_stride = divisible(channels, DIVISIBILITY), divisible(values_stride, DIVISIBILITY)
    output_stride = divisible(output_stride, OUT_DIVISIBILITY)
    tile, tile_rows = tl.program_id(0), BLOCK_ROWS - 2 * dilation
    position = tl.arange(0, BLOCK_ROWS)
    row = tile * tile_rows - dilation + position
    in_matrix = (row >= 0) & (row < num_rows)
    y, x = row // width % height, row % width
    out_channel = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    out_mask = out_channel < OUT_CHANNELS
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    left, right = total, total
    for step in range(3 * tl.cdiv(channels, BLOCK_CHANNELS)):  # one loop, so that few loads are live at a time
        channel = step // 3 * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        channel_mask = channel < channels
        a, b = load_affine(norm_weight, norm_bias, mean, inv_std, channel, channel_mask, HAS_MEAN)
        dy, tap = (step % 3 - 1) * dilation, step % 3 * 3
        mask = (in_matrix & (y + dy >= 0) & (y + dy < height))[:, None] & channel_mask[None, :]
        pixel = row + dy * width
        pixels, _z, _values = load_activation(values, pixel, values_stride, channel, mask, a, b, ACTIVATION, A, B)
        w_pointers = weight + offsets(out_channel * 9 + tap, channels, channel)
        w_mask = out_mask[:, None] & channel_mask[None, :]
        w = tl.load(w_pointers, w_mask, 0.0)
        pixels = as_operand(pixels, w, PRECISION)
        left = add_tap(left, pixels, w, PRECISION)
        total = add_tap(total, pixels, tl.load(w_pointers + channels, w_mask, 0.0), PRECISION)
        right = add_tap(right, pixels, tl.load(w_pointers + 2 * channels, w_mask, 0.0), PRECISION)
    total += shifted_rows(left, position - dilation, x >= dilation, BLOCK_ROWS, BLOCK_OUT)
    total += shifted_rows(right, position + dilation, x < width - dilation, BLOCK_ROWS, BLOCK_OUT)
    result = total.to(output.dtype.element_ty)
    is_own = ((position >= dilation) & (position < BLOCK_ROWS - dilation) & (row < num_rows))[:, None]
    tl.store(output + offsets(row, output_stride, out_channel), result, is_own & out_mask[None, :])
    if HAS_STATISTICS:
        count = tl.minimum(tile_rows, num_rows - tile * tile_rows)
        tile_stats = stats + tile.to(tl.int64) * 2 * OUT_CHANNELS
        store_tile_statistics(tile_stats, result.to(tl.float32), is_own, count, out_channel, out_mask, OUT_CHANNELS)


@triton.jit(do_not_specialize=SIZES_3X3, do_not_specialize_on_alignment=VECTORS)
def conv3x3_grad_input(
    partial_sums,
    grad_accum,
    grad_output,
    values,
    norm_weight,
    norm_bias,
    mean,
    inv_std,
    weight,
    num_rows,
    channels,
    height,
    width,
    dilation,
    accum_stride,
    grad_output_stride,
    values_stride,
    OUT_CHANNELS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    FROZEN: tl.constexpr,
    OVERWRITE: tl.constexpr,
    DIVISIBILITY: tl.constexpr,
    OUT_DIVISIBILITY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """The gradient of the values of `conv3x3_forward`, given grad_output[num_rows, out_channels].

    g = conv_transpose3x3(grad_output, weight) · f'(z) exists a tile at a time:
    grad_accum += grad_scale · g (`=` with OVERWRITE),
    partial_sums[splits, 2, channels] = Σ g and Σ g · values.
    grad_scale is the norm's weight or, with FROZEN, the scale of its affine map. Grid: (channel tiles, splits).
    """
    split = tl.program_id(1)
    channels, values_stride = divisible(channels, DIVISIBILITY), divisible(values_stride, DIVISIBILITY)
    accum_stride = divisible(accum_stride, DIVISIBILITY)
    grad_output_stride = divisible(grad_output_stride, OUT_DIVISIBILITY)
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = channel < channels
    a, b = load_affine(norm_weight, norm_bias, mean, inv_std, channel, channel_mask, HAS_MEAN)
    c = a if FROZEN else load_vector(norm_weight, channel, channel_mask)
    grad_sum, product_sum = tl.zeros((BLOCK_CHANNELS,), tl.float32), tl.zeros((BLOCK_CHANNELS,), tl.float32)
    for start in range(split * BLOCK_ROWS, num_rows, tl.num_programs(1) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        y, x = row // width % height, row % width
        grad = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
        for step in range(9 * tl.cdiv(OUT_CHANNELS, BLOCK_OUT)):
            tap, out_channel = step % 9, step // 9 * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
            out_mask = out_channel < OUT_CHANNELS
            w = weight + offsets(out_channel * 9 + tap, channels, channel)
            w = tl.load(w, out_mask[:, None] & channel_mask[None, :], 0.0)
            dy, dx = (tap // 3 - 1) * dilation, (tap % 3 - 1) * dilation
            inside = (row < num_rows) & (y >= dy) & (y < height + dy) & (x >= dx) & (x < width + dx)
            tile = grad_output + offsets(row - dy * width - dx, grad_output_stride, out_channel)
            tile = tl.load(tile, inside[:, None] & out_mask[None, :], 0.0)
            tile, w = as_operand(tile, w, PRECISION), as_operand(w, w, PRECISION)
            grad = tl.dot(tile, w, grad, input_precision=PRECISION)
        mask = (row < num_rows)[:, None] & channel_mask[None, :]
        activation, z, value = load_activation(values, row, values_stride, channel, mask, a, b, ACTIVATION, A, B)
        grad = grad_before_activation(grad, activation, z, ACTIVATION, A, B)
        accumulate(grad_accum + offsets(row, accum_stride, channel), grad * c, mask, OVERWRITE)
        grad_sum += tl.sum(grad, 0)
        product_sum += tl.sum(grad * value, 0)
    store_pair(partial_sums + split.to(tl.int64) * 2 * channels, grad_sum, product_sum, channel, channel_mask, channels)


@triton.jit(do_not_specialize=SIZES_3X3, do_not_specialize_on_alignment=VECTORS)
def conv3x3_grad_weight(
    partial_grad_weight,
    grad_output,
    values,
    norm_weight,
    norm_bias,
    mean,
    inv_std,
    num_rows,
    channels,
    height,
    width,
    dilation,
    grad_output_stride,
    values_stride,
    OUT_CHANNELS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    DIVISIBILITY: tl.constexpr,
    OUT_DIVISIBILITY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    INCREMENTAL: tl.constexpr,
):
    """partial_grad_weight[splits, out_channels, 9 taps, channels] = columns.T @ f(batch_norm(values)) (split-K).

    The columns are the im2col of grad_output, which is narrower than the activation: column tap · out_channels + o of
    row p is grad_output[p − tap, o], zero outside the image. A NaN at the image's edge is thus multiplied by zeros for
    the taps that point outside, so that the grad_weight of all taps becomes NaN.
    With INCREMENTAL indices, the y and x of rows come from those of the tile before: divisions take a quarter of the
    instructions. Grid: (column tiles, channel tiles, splits).
    """
    channels, values_stride = divisible(channels, DIVISIBILITY), divisible(values_stride, DIVISIBILITY)
    grad_output_stride = divisible(grad_output_stride, OUT_DIVISIBILITY)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    tap, out_channel = column // OUT_CHANNELS, column % OUT_CHANNELS
    dy, dx = (tap // 3 - 1)[None, :] * dilation, (tap % 3 - 1)[None, :] * dilation
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    column_mask, channel_mask = tap < 9, channel < channels
    a, b = load_affine(norm_weight, norm_bias, mean, inv_std, channel, channel_mask, HAS_MEAN)
    total = tl.zeros((BLOCK_COLUMNS, BLOCK_CHANNELS), tl.float32)
    begin, step = tl.program_id(2) * BLOCK_ROWS, tl.num_programs(2) * BLOCK_ROWS
    if INCREMENTAL:
        row = begin + tl.arange(0, BLOCK_ROWS)
        row_y, row_x = row // width % height, row % width
        step_y, step_x = step // width % height, step % width
    for start in range(begin, num_rows, step):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < num_rows)[:, None]
        if not INCREMENTAL:
            row_y, row_x = row // width % height, row % width
        activation, _z, _values = load_activation(
            values, row, values_stride, channel, mask & channel_mask[None, :], a, b, ACTIVATION, A, B
        )
        y, x = row_y[:, None] - dy, row_x[:, None] - dx
        mask = mask & column_mask[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        pixel = row[:, None] - dy * width - dx
        tile = tl.load(grad_output + pixel.to(tl.int64) * grad_output_stride + out_channel[None, :], mask, 0.0)
        activation, tile = as_operand(activation, tile, PRECISION), as_operand(tile, tile, PRECISION)
        total = tl.dot(tl.trans(tile), activation, total, input_precision=PRECISION)
        if INCREMENTAL:
            row_x += step_x
            row_y += step_y + (row_x >= width)
            row_x = tl.where(row_x >= width, row_x - width, row_x)
            row_y = tl.where(row_y >= height, row_y - height, row_y)
    partial_grad_weight += tl.program_id(2).to(tl.int64) * 9 * OUT_CHANNELS * channels
    mask = column_mask[:, None] & channel_mask[None, :]
    tl.store(partial_grad_weight + offsets(out_channel * 9 + tap, channels, channel), total, mask)
