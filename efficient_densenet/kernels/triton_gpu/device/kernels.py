"""The fused kernels, in Triton. `operations` launches them; `portable` defines what they compute.

Layout: matrices are (rows, channels) with contiguous channels; a `*_stride` is a row stride. A row is a pixel, or a
pooling window of POOL × POOL pixels, which pooling reduces to one pixel.

Grids: tiles are BLOCK_ROWS × BLOCK_CHANNELS. A kernel that loops over the rows is split among the program instances of
grid axis 1: each takes every num_programs-th tile of rows. A reduction over the rows is thus split-K: each instance
stores its partial sums in its own slice of the output, without atomics, and a kernel of `finishing_kernels` adds the
slices in a fixed order, so that results are reproducible.

A norm is given by its own vectors, of any floating dtype: weight γ, bias β, mean μ (with HAS_MEAN; else the values are
stored centered) and inv_std r. It is the affine map with scale = γ · r and shift = β − μ · scale. `grad_scale` is scale
where the norm is FROZEN, else γ.

ACTIVATION, A and B are those of `activations`.

DIVISIBILITY is a power of two that divides `channels` and every stride, so that the compiler may vectorize loads and
stores. Products and sums are in float32.
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
    window_pixel,
)
from .formulas import activate, grad_before_activation


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def affine_activation_pool_forward(
    output,
    values,
    norm_weight,
    norm_bias,
    mean,
    inv_std,
    num_rows,
    channels,
    values_stride,
    height,
    width,
    HAS_MEAN: tl.constexpr,
    POOL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    DIVISIBILITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """output[num_rows, channels] = average_pool(f(scale · values + shift)) over windows of POOL × POOL pixels.

    Grid: (channel tiles, splits of the rows).
    """
    channels, values_stride = divisible(channels, DIVISIBILITY), divisible(values_stride, DIVISIBILITY)
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = channel < channels
    a, b = load_affine(norm_weight, norm_bias, mean, inv_std, channel, channel_mask, HAS_MEAN)
    for start in range(tl.program_id(1) * BLOCK_ROWS, num_rows, tl.num_programs(1) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < num_rows)[:, None] & channel_mask[None, :]
        total = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
        for i in tl.static_range(POOL * POOL):
            pixel = window_pixel(row, height, width, i, POOL)
            z = tl.load(values + offsets(pixel, values_stride, channel), mask, 0.0).to(tl.float32) * a + b
            total += activate(z, ACTIVATION, A, B)
        tl.store(output + offsets(row, channels, channel), total * (1.0 / (POOL * POOL)), mask)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def affine_activation_pool_backward(
    partial_sums,
    grad_accum,
    grad_output,
    values,
    norm_weight,
    norm_bias,
    mean,
    inv_std,
    num_rows,
    channels,
    accum_stride,
    values_stride,
    height,
    width,
    HAS_MEAN: tl.constexpr,
    FROZEN: tl.constexpr,
    POOL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    OVERWRITE: tl.constexpr,
    DIVISIBILITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """The backward of `affine_activation_pool_forward`, given grad_output[num_rows, channels].

    For each pixel x of a window, g = f'(scale · x + shift) · grad_output / POOL²:
    grad_accum += grad_scale · g (`=` with OVERWRITE),
    partial_sums[splits, 2, channels] = Σ g and Σ g · x.
    Grid: (channel tiles, splits).
    """
    channels, values_stride = divisible(channels, DIVISIBILITY), divisible(values_stride, DIVISIBILITY)
    accum_stride = divisible(accum_stride, DIVISIBILITY)
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = channel < channels
    a, b = load_affine(norm_weight, norm_bias, mean, inv_std, channel, channel_mask, HAS_MEAN)
    c = a if FROZEN else load_vector(norm_weight, channel, channel_mask)
    grad_sum = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    product_sum = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_ROWS, num_rows, tl.num_programs(1) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < num_rows)[:, None] & channel_mask[None, :]
        pooled_grad = tl.load(grad_output + offsets(row, channels, channel), mask, 0.0).to(tl.float32)
        pooled_grad = pooled_grad * (1.0 / (POOL * POOL))
        for i in tl.static_range(POOL * POOL):
            pixel = window_pixel(row, height, width, i, POOL)
            x = tl.load(values + offsets(pixel, values_stride, channel), mask, 0.0).to(tl.float32)
            z = x * a + b
            grad = grad_before_activation(pooled_grad, z, z, ACTIVATION, A, B)
            accumulate(grad_accum + offsets(pixel, accum_stride, channel), grad * c, mask, OVERWRITE)
            grad_sum += grad
            product_sum += grad * x
    partial_sums += tl.program_id(1).to(tl.int64) * 2 * channels
    store_pair(partial_sums, tl.sum(grad_sum, 0), tl.sum(product_sum, 0), channel, channel_mask, channels)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def batch_norm_grad_input(
    output,
    grad_accum,
    values,
    mean,
    inv_std,
    sums,
    inv_count,
    num_rows,
    channels,
    output_stride,
    accum_stride,
    values_stride,
    sums_stride,
    HAS_MEAN: tl.constexpr,
    DIVISIBILITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """output[num_rows, channels] = r · (g − mean(g) − x̂ · mean(g · x̂)), with x̂ = (x − μ) · r and g = grad_accum.

    sums[2, channels] are Σ g and Σ g · x̂ over 1 / inv_count rows. Computed as slope · x + constant + r · g. The output
    may be grad_accum.
    Grid: (channel tiles, splits of the rows).
    """
    channels, values_stride = divisible(channels, DIVISIBILITY), divisible(values_stride, DIVISIBILITY)
    output_stride, accum_stride = divisible(output_stride, DIVISIBILITY), divisible(accum_stride, DIVISIBILITY)
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = channel < channels
    a, b, c = batch_norm_grad_coefficients(
        mean, inv_std, sums, sums_stride, inv_count, channel, channel_mask, True, HAS_MEAN
    )
    for start in range(tl.program_id(1) * BLOCK_ROWS, num_rows, tl.num_programs(1) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < num_rows)[:, None] & channel_mask[None, :]
        x = tl.load(values + offsets(row, values_stride, channel), mask, 0.0).to(tl.float32)
        grad = tl.load(grad_accum + offsets(row, accum_stride, channel), mask, 0.0).to(tl.float32)
        tl.store(output + offsets(row, output_stride, channel), x * a + b + grad * c, mask)
