"""The 1×1 convolution after a norm and an activation, and its backward, in Triton. `conv1x1` launches them.

Layout and grids are as in `kernels`. A tile has all OUT_CHANNELS output channels.
"""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl

from .device_functions import (
    SIZES,
    VECTORS,
    accumulate,
    batch_norm_grad_coefficients,
    divisible,
    load_affine,
    load_vector,
    offsets,
    store_pair,
)
from .formulas import activate, grad_before_activation
from .operands import as_operand
from .statistics_kernels import store_tile_statistics

OUT_VECTORS = ["out_mean", "out_inv_std", "out_sums"]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def conv1x1_forward(
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
    values_stride,
    OUT_CHANNELS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    DIVISIBILITY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """output[num_rows, out_channels] = f(norm(values)) @ weight[out_channels, channels].T

    A GEMM whose prologue is the norm and the activation f, and whose epilogue is the statistics of the tile as it is
    stored, stats[row tiles, 2, OUT_CHANNELS]. A tile has all output channels; the loop is over input channels (K).
    Grid: (row tiles,).
    """
    tile = tl.program_id(0)
    channels, values_stride = divisible(channels, DIVISIBILITY), divisible(values_stride, DIVISIBILITY)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    out_channel = tl.arange(0, BLOCK_OUT)
    row_mask, out_mask = (row < num_rows)[:, None], out_channel < OUT_CHANNELS
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for start in range(0, channels, BLOCK_CHANNELS):
        channel = start + tl.arange(0, BLOCK_CHANNELS)
        channel_mask = channel < channels
        x = tl.load(values + offsets(row, values_stride, channel), row_mask & channel_mask[None, :], 0.0).to(tl.float32)
        w = tl.load(weight + offsets(out_channel, channels, channel), out_mask[:, None] & channel_mask[None, :], 0.0)
        scale, shift = load_affine(norm_weight, norm_bias, mean, inv_std, channel, channel_mask, HAS_MEAN)
        activation = as_operand(activate(x * scale + shift, ACTIVATION, A, B), w, PRECISION)
        total = tl.dot(activation, tl.trans(as_operand(w, w, PRECISION)), total, input_precision=PRECISION)
    result = total.to(output.dtype.element_ty)
    tl.store(output + offsets(row, OUT_CHANNELS, out_channel), result, row_mask & out_mask[None, :])
    if HAS_STATISTICS:
        count = tl.minimum(BLOCK_ROWS, num_rows - tile * BLOCK_ROWS)
        tile_stats = stats + tile.to(tl.int64) * 2 * OUT_CHANNELS
        store_tile_statistics(tile_stats, result.to(tl.float32), row_mask, count, out_channel, out_mask, OUT_CHANNELS)


@triton.jit
def tile_offsets(row, stride, channel):
    """(rows, channels) offsets within a tile, in int32: a tile is small, and int64 would take twice the registers."""
    return row[:, None] * stride + channel[None, :]


@triton.jit
def grad_output_operand(output, grad_accum, offset, mask, slope, constant, r, w, PRECISION: tl.constexpr):
    """slope · output + constant + r · grad_accum as an operand of products."""
    grad = tl.load(grad_accum + offset, mask, 0.0).to(tl.float32)
    z = tl.load(output + offset, mask, 0.0).to(tl.float32)
    grad = tl.where(mask, z * slope + constant + grad * r, 0.0)
    return as_operand(grad, w, PRECISION)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=[*VECTORS, *OUT_VECTORS])
def conv1x1_backward(
    partial_grad_weight,
    partial_sums,
    grad_accum,
    output,
    output_grad_accum,
    out_mean,
    out_inv_std,
    out_sums,
    values,
    norm_weight,
    norm_bias,
    mean,
    inv_std,
    weight,
    inv_count,
    num_rows,
    channels,
    accum_stride,
    values_stride,
    sums_stride,
    OUT_CHANNELS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_OUT_MEAN: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    FROZEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    OVERWRITE: tl.constexpr,
    NEEDS_GRAD_WEIGHT: tl.constexpr,
    DIVISIBILITY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The backward of `conv1x1_forward`, with y = f(z) and z = norm(values).

    Its prologue is the backward of the batch norm that reads the convolution's output, as in `batch_norm_grad_input`:
    grad_output = slope · output + constant + r · output_grad_accum; without HAS_SUMS, it is output_grad_accum,
    which is then passed as `output` too.
    g = (grad_output @ weight[out_channels, channels]) · f'(z) exists a tile at a time:
    grad_accum += grad_scale · g (`=` with OVERWRITE),
    partial_sums[splits, 2, channels] = Σ g and Σ g · values,
    partial_grad_weight[splits, OUT_CHANNELS, channels] = grad_output.T @ y (split-K). Grid: (channel tiles, splits).

    The output channels come in two parts, BLOCK_OUT and BLOCK_REST, so that 192 channels need not be padded to 256.
    """
    channels, values_stride = divisible(channels, DIVISIBILITY), divisible(values_stride, DIVISIBILITY)
    accum_stride = divisible(accum_stride, DIVISIBILITY)
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = channel < channels
    scale, shift = load_affine(norm_weight, norm_bias, mean, inv_std, channel, channel_mask, HAS_MEAN)
    accum_scale = scale if FROZEN else load_vector(norm_weight, channel, channel_mask)
    tile_row = tl.arange(0, BLOCK_ROWS)

    out = tl.arange(0, BLOCK_OUT)
    out_mask = out < OUT_CHANNELS
    w_mask = out_mask[:, None] & channel_mask[None, :]
    w = tl.load(weight + tile_offsets(out, channels, channel), w_mask, 0.0)
    w = as_operand(w, w, PRECISION)
    a, b, c = batch_norm_grad_coefficients(
        out_mean, out_inv_std, out_sums, sums_stride, inv_count, out, out_mask, HAS_SUMS, HAS_OUT_MEAN
    )
    grad_weight = tl.zeros((BLOCK_OUT, BLOCK_CHANNELS), tl.float32)
    if BLOCK_REST:
        rest = BLOCK_OUT + tl.arange(0, BLOCK_REST)
        rest_mask = rest < OUT_CHANNELS
        w_rest_mask = rest_mask[:, None] & channel_mask[None, :]
        w_rest = tl.load(weight + tile_offsets(rest, channels, channel), w_rest_mask, 0.0)
        w_rest = as_operand(w_rest, w_rest, PRECISION)
        a_rest, b_rest, c_rest = batch_norm_grad_coefficients(
            out_mean, out_inv_std, out_sums, sums_stride, inv_count, rest, rest_mask, HAS_SUMS, HAS_OUT_MEAN
        )
        grad_weight_rest = tl.zeros((BLOCK_REST, BLOCK_CHANNELS), tl.float32)

    begin, step = tl.program_id(1) * BLOCK_ROWS, tl.num_programs(1) * BLOCK_ROWS
    grad_sum, product_sum = tl.zeros((BLOCK_CHANNELS,), tl.float32), tl.zeros((BLOCK_CHANNELS,), tl.float32)
    for start in range(begin, num_rows, step):
        first = tl.cast(start, tl.int64)
        row_mask = (tile_row < num_rows - start)[:, None]
        mask = row_mask & channel_mask[None, :]
        out_tile, out_accum_tile = output + first * OUT_CHANNELS, output_grad_accum + first * OUT_CHANNELS
        x = tl.load(values + first * values_stride + tile_offsets(tile_row, values_stride, channel), mask, 0.0)
        z = x.to(tl.float32) * scale + shift
        activation = activate(z, ACTIVATION, A, B)
        y = as_operand(activation, w, PRECISION)
        offset, tile_mask = tile_offsets(tile_row, OUT_CHANNELS, out), row_mask & out_mask[None, :]
        grad_out = grad_output_operand(out_tile, out_accum_tile, offset, tile_mask, a, b, c, w, PRECISION)
        if NEEDS_GRAD_WEIGHT:
            grad_weight = tl.dot(tl.trans(grad_out), y, grad_weight, input_precision=PRECISION)
        grad = tl.dot(grad_out, w, input_precision=PRECISION)
        if BLOCK_REST:
            offset, tile_mask = tile_offsets(tile_row, OUT_CHANNELS, rest), row_mask & rest_mask[None, :]
            grad_rest = grad_output_operand(
                out_tile, out_accum_tile, offset, tile_mask, a_rest, b_rest, c_rest, w, PRECISION
            )
            if NEEDS_GRAD_WEIGHT:
                grad_weight_rest = tl.dot(tl.trans(grad_rest), y, grad_weight_rest, input_precision=PRECISION)
            grad = tl.dot(grad_rest, w_rest, grad, input_precision=PRECISION)
        grad = grad_before_activation(grad, activation, z, ACTIVATION, A, B)
        accum_tile = grad_accum + first * accum_stride + tile_offsets(tile_row, accum_stride, channel)
        accumulate(accum_tile, grad * accum_scale, mask, OVERWRITE)
        grad_sum += tl.sum(grad, 0)
        product_sum += tl.sum(grad * x.to(tl.float32), 0)
    split = tl.program_id(1).to(tl.int64)
    if NEEDS_GRAD_WEIGHT:
        partial_grad_weight += split * OUT_CHANNELS * channels
        tl.store(partial_grad_weight + tile_offsets(out, channels, channel), grad_weight, w_mask)
        if BLOCK_REST:
            tl.store(partial_grad_weight + tile_offsets(rest, channels, channel), grad_weight_rest, w_rest_mask)
    partial_sums += split * 2 * channels
    store_pair(partial_sums, grad_sum, product_sum, channel, channel_mask, channels)
