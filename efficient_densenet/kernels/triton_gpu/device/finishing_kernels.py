"""The launch after a backward kernel: it reduces partial sums and computes the norm's gradients.

Layout and grids are as in `kernels`.
"""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl

from .device_functions import SIZES, VECTORS, accumulate, load_vector, offsets


@triton.jit
def sum_of_splits(partials, splits, stride, column, mask, BLOCK_SPLITS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """The sum over splits of partials[splits, columns], whose row stride is `stride`: (1, columns), in a fixed
    order."""
    total = tl.zeros((BLOCK_SPLITS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        total += tl.load(partials + offsets(split, stride, column), (split < splits)[:, None] & mask[None, :], 0.0)
    return tl.sum(total, 0, keep_dims=True)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def finish_backward(
    grad_norm_bias,
    grad_norm_weight,
    grad_weight,
    sums,
    partial_sums,
    partial_grad_weight,
    norm_weight,
    mean,
    inv_std,
    splits,
    weight_splits,
    channels,
    num_weights,
    sums_stride,
    HAS_MEAN: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A norm's gradients from partial_sums[splits, 2, channels] of Σ g and Σ g · x, and the gradient of a convolution's
    weight: grad_norm_bias[channels] = Σ g, grad_norm_weight[channels] = r · (Σ g · x − μ · Σ g).

    With HAS_SUMS, sums[2, channels] += γ · grad_norm_bias and γ · grad_norm_weight. With HAS_GRAD_WEIGHT,
    grad_weight[out_channels, channels, TAPS] = the sum of partial_grad_weight[weight_splits, out_channels, TAPS,
    channels].
    Grid: (channel tiles + tiles of grad_weight,).
    """
    channel_tiles = tl.cdiv(channels, BLOCK_COLUMNS)
    tile = tl.program_id(0)
    if tile < channel_tiles:
        channel = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        mask = channel < channels
        stride = 2 * channels
        grad_sum = sum_of_splits(partial_sums, splits, stride, channel, mask, BLOCK_SPLITS, BLOCK_COLUMNS)
        product_sum = partial_sums + channels
        product_sum = sum_of_splits(product_sum, splits, stride, channel, mask, BLOCK_SPLITS, BLOCK_COLUMNS)
        if HAS_MEAN:
            product_sum -= load_vector(mean, channel, mask) * grad_sum
        product_sum *= load_vector(inv_std, channel, mask)
        row_mask = mask[None, :]
        tl.store(grad_norm_bias + channel[None, :], grad_sum, row_mask)
        tl.store(grad_norm_weight + channel[None, :], product_sum, row_mask)
        if HAS_SUMS:
            weight, row = load_vector(norm_weight, channel, mask), sums + channel[None, :]
            accumulate(row, weight * grad_sum, row_mask, False)
            accumulate(row + sums_stride, weight * product_sum, row_mask, False)
    elif HAS_GRAD_WEIGHT:
        column = (tile - channel_tiles) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        mask = column < num_weights
        partial = partial_grad_weight
        total = sum_of_splits(partial, weight_splits, num_weights, column, mask, BLOCK_SPLITS, BLOCK_COLUMNS)
        tap, channel = column // channels, column % channels
        position = (tap // TAPS * channels + channel) * TAPS + tap % TAPS
        tl.store(grad_weight + position[None, :], total, mask[None, :])
