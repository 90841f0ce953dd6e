"""Mean and variance of each channel, in Triton: statistics of tiles, then Chan's parallel variance. And the values
without the mean.

Layout and grids are as in `kernels`.
"""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl

from .device_functions import SIZES, VECTORS, divisible, load_vector, offsets, store_pair


@triton.jit
def store_tile_statistics(pair, values, mask, count, channel, channel_mask, channels):
    """Store mean and M2 = Σ (x − mean)² of a tile of `count` rows into pair[2, channels], by two passes over registers.

    The mean's own rounding error, δ = mean(x − mean), is added to the mean and removed from M2: M2 − count · δ².
    """
    mean = tl.sum(tl.where(mask, values, 0.0), 0) / count
    centered = tl.where(mask, values - mean[None, :], 0.0)
    delta = tl.sum(centered, 0) / count
    m2 = tl.sum(centered * centered, 0) - count * delta * delta
    store_pair(pair, mean + delta, m2, channel, channel_mask, channels)


@triton.jit(do_not_specialize=SIZES)
def tile_statistics(
    stats,
    values,
    num_rows,
    channels,
    values_stride,
    DIVISIBILITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """stats[row tiles, 2, channels] = mean and M2 of each tile of values[num_rows, channels].

    Grid: (row tiles, channel tiles).
    """
    channels, values_stride = divisible(channels, DIVISIBILITY), divisible(values_stride, DIVISIBILITY)
    tile = tl.program_id(0)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = channel < channels
    mask = (row < num_rows)[:, None] & channel_mask[None, :]
    x = tl.load(values + offsets(row, values_stride, channel), mask, 0.0).to(tl.float32)
    count = tl.minimum(BLOCK_ROWS, num_rows - tile * BLOCK_ROWS)
    store_tile_statistics(stats + tile.to(tl.int64) * 2 * channels, x, mask, count, channel, channel_mask, channels)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["result"])
def combine_statistics(
    result,
    stats,
    eps,
    num_rows,
    channels,
    stats_stride,
    block_rows,
    BLOCK_TILES: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """result[3, channels] = mean, biased variance and 1 / sqrt(var + eps) of all rows, from stats[row tiles, 2,
    channels]; `stats_stride` is the stride of result's rows.

    Chan's parallel variance, from n_t ≤ block_rows rows, mean_t and M2_t of each tile t, avoids cancellation:
    mean = Σ n_t · mean_t / n,  var = (Σ M2_t + Σ n_t · (mean_t − mean)²) / n.
    As in a tile, the rounding error of the mean is computed and removed from both. Grid: (channel tiles,).
    """
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = channel < channels
    tiles = tl.cdiv(num_rows, block_rows)
    total = tl.zeros((BLOCK_TILES, BLOCK_CHANNELS), tl.float32)
    for start in range(0, tiles, BLOCK_TILES):
        tile = start + tl.arange(0, BLOCK_TILES)
        mask = (tile < tiles)[:, None] & channel_mask[None, :]
        count = tl.minimum(block_rows, num_rows - tile * block_rows)[:, None]
        total += tl.load(stats + offsets(tile, 2 * channels, channel), mask, 0.0) * count
    mean = tl.sum(total, 0) / num_rows
    delta_sum = tl.zeros((BLOCK_TILES, BLOCK_CHANNELS), tl.float32)
    m2 = tl.zeros((BLOCK_TILES, BLOCK_CHANNELS), tl.float32)
    for start in range(0, tiles, BLOCK_TILES):
        tile = start + tl.arange(0, BLOCK_TILES)
        mask = (tile < tiles)[:, None] & channel_mask[None, :]
        count = tl.minimum(block_rows, num_rows - tile * block_rows)[:, None]
        tile_mean = stats + offsets(tile, 2 * channels, channel)
        delta = tl.where(mask, tl.load(tile_mean, mask, 0.0) - mean[None, :], 0.0)
        delta_sum += delta * count
        m2 += tl.load(tile_mean + channels, mask, 0.0) + delta * delta * count
    mean_error = tl.sum(delta_sum, 0) / num_rows
    variance = tl.sum(m2, 0) / num_rows - mean_error * mean_error
    store_pair(result, mean + mean_error, variance, channel, channel_mask, stats_stride)
    tl.store(result + 2 * stats_stride + channel, tl.rsqrt(variance + eps), channel_mask)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=VECTORS)
def center(
    output,
    values,
    mean,
    num_rows,
    channels,
    output_stride,
    values_stride,
    DIVISIBILITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """output[num_rows, channels] = values − mean. Grid: (row tiles, channel tiles)."""
    channels, values_stride = divisible(channels, DIVISIBILITY), divisible(values_stride, DIVISIBILITY)
    output_stride = divisible(output_stride, DIVISIBILITY)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = channel < channels
    mask = (row < num_rows)[:, None] & channel_mask[None, :]
    x = tl.load(values + offsets(row, values_stride, channel), mask, 0.0).to(tl.float32)
    tl.store(output + offsets(row, output_stride, channel), x - load_vector(mean, channel, channel_mask), mask)
