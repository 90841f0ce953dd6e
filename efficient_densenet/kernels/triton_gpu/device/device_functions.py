"""Functions that are inlined into several Triton kernels."""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl

# Sizes vary with layer and batch. Triton must not specialize on them, or it would compile a kernel for each value.
SIZES = [
    *("num_rows", "channels", "height", "width", "values_stride", "accum_stride"),
    *("sums_stride", "stats_stride", "splits", "weight_splits", "num_weights", "block_rows"),
    "finished_channels",
]

# Vectors of channels may begin anywhere in a matrix of statistics, and have too few loads to profit from alignment.
VECTORS = ["norm_weight", "norm_bias", "mean", "inv_std", "sums", "statistics"]


@triton.jit
def divisible(size, DIVISIBILITY: tl.constexpr):
    """`size` itself, in a form from which the compiler infers that DIVISIBILITY divides it."""
    return size // DIVISIBILITY * DIVISIBILITY


@triton.jit
def offsets(row, stride, channel):
    """(rows, channels) offsets, in int64."""
    return row.to(tl.int64)[:, None] * stride + channel[None, :]


@triton.jit
def load_vector(pointer, channel, channel_mask):
    """(1, channels) in float32."""
    return tl.load(pointer + channel, channel_mask, 0.0).to(tl.float32)[None, :]


@triton.jit
def load_affine(norm_weight, norm_bias, mean, inv_std, channel, channel_mask, HAS_MEAN: tl.constexpr):
    """scale = γ · r and shift = β − μ · scale of a norm, (1, channels) each; without HAS_MEAN shift = β."""
    scale = load_vector(norm_weight, channel, channel_mask) * load_vector(inv_std, channel, channel_mask)
    shift = load_vector(norm_bias, channel, channel_mask)
    if HAS_MEAN:
        shift -= load_vector(mean, channel, channel_mask) * scale
    return scale, shift


@triton.jit
def batch_norm_grad_coefficients(
    mean, inv_std, sums, sums_stride, inv_count, channel, mask, HAS_SUMS: tl.constexpr, HAS_MEAN: tl.constexpr
):
    """slope, constant and r of a batch norm's backward, slope · x + constant + r · g. Without HAS_SUMS the result is
    g."""
    if HAS_SUMS:
        r = load_vector(inv_std, channel, mask)
        slope = load_vector(sums + sums_stride, channel, mask) * r * (-inv_count * r)
        constant = load_vector(sums, channel, mask) * (-inv_count * r)
        if HAS_MEAN:
            constant -= load_vector(mean, channel, mask) * slope
    else:
        r = tl.where(mask, 1.0, 0.0)[None, :]
        slope, constant = 0.0 * r, 0.0 * r
    return slope, constant, r


@triton.jit
def window_pixel(row, height, width, i, POOL: tl.constexpr):
    """The i-th pixel of the POOL × POOL window that pooling reduces to output pixel `row`, as a row of the input."""
    if POOL == 1:
        pixel = row.to(tl.int64)
    else:
        pooled_width, pooled_height = width // POOL, height // POOL
        y = row // pooled_width % pooled_height * POOL + i // POOL
        x = row % pooled_width * POOL + i % POOL
        pixel = (row // pooled_width // pooled_height).to(tl.int64) * height * width + y * width + x
    return pixel


@triton.jit
def accumulate(pointer, values, mask, OVERWRITE: tl.constexpr):
    """Memory += values, or `=` with OVERWRITE."""
    if OVERWRITE:
        tl.store(pointer, values, mask)
    else:
        tl.store(pointer, tl.load(pointer, mask, 0.0).to(tl.float32) + values, mask)


@triton.jit
def store_pair(pair, first, second, channel, channel_mask, stride):
    """Store two vectors into pair[2, channels], whose row stride is `stride`."""
    tl.store(pair + channel, first, channel_mask)
    tl.store(pair + stride + channel, second, channel_mask)
