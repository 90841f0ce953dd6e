"""Batch statistics by Chan's parallel variance, in float64: each tile's mean and squared distances are merged into
its thread's, and all threads' at the end."""

import math

from ...interface import INV_STD, MEAN, VARIANCE
from ..compiler.intrinsics import compiled
from .memory import clear, elements, row_of
from .threads import barrier, partition

STATISTICS_ROWS = 5
"""A thread's partials: its number of rows so far, their mean, their sum of squared distances from the mean, and the
current tile's mean and sum of squared distances."""


@compiled
def clear_statistics(statistics, thread):
    count = STATISTICS_ROWS * statistics.channels
    clear(statistics.partials + thread * count * 8, count, 1.0)


@compiled
def update_statistics(statistics, matrix, thread, start, stop):
    """Merge rows start to stop of the matrix into the thread's partials.

    With a the thread's rows so far, b the new rows, M2 the sum of squared distances, δ = mean_b − mean_a and
    n = n_a + n_b: mean += δ · n_b / n and M2 += M2_b + δ² · n_a · n_b / n.
    """
    channels = statistics.channels
    partials = statistics.partials + thread * STATISTICS_ROWS * channels * 8
    seen, means = elements(partials, 0, channels, 1.0), elements(partials, channels, channels, 1.0)
    squares = elements(partials, 2 * channels, channels, 1.0)
    tile_means = elements(partials, 3 * channels, channels, 1.0)
    tile_squares = elements(partials, 4 * channels, channels, 1.0)
    before, count = seen[0], stop - start
    for j in range(channels):
        seen[j] = before + count
        tile_means[j] = tile_squares[j] = 0
    for row in range(start, stop):
        values = row_of(matrix, row, 0, channels)
        for j in range(channels):
            tile_means[j] += values[j]
    for j in range(channels):
        tile_means[j] /= count
    for row in range(start, stop):
        values = row_of(matrix, row, 0, channels)
        for j in range(channels):
            tile_squares[j] += (values[j] - tile_means[j]) ** 2
    for j in range(channels):
        delta = tile_means[j] - means[j]
        means[j] += delta * count / (before + count)
        squares[j] += tile_squares[j] + delta * delta * before * count / (before + count)


@compiled
def reduce_statistics(openmp, statistics, rows, thread, threads, zero):
    """Mean, biased variance and 1 / sqrt(var + eps) of all rows, from the partials of all threads; each thread has some
    of the channels."""
    barrier(openmp)
    channels, matrix = statistics.channels, statistics.matrix
    means = elements(matrix.data, MEAN * matrix.row_stride, channels, zero)
    variances = elements(matrix.data, VARIANCE * matrix.row_stride, channels, zero)
    inv_stds = elements(matrix.data, INV_STD * matrix.row_stride, channels, zero)
    eps = elements(statistics.eps, 0, 1, 1.0)[0]
    partials = elements(statistics.partials, 0, threads * STATISTICS_ROWS * channels, 1.0)
    first, last = partition(channels, thread, threads)
    for j in range(first, last):
        mean = squares = 0.0
        for i in range(threads):
            at = i * STATISTICS_ROWS * channels + j
            mean += partials[at + channels] * partials[at]
        mean /= rows
        for i in range(threads):
            at = i * STATISTICS_ROWS * channels + j
            squares += partials[at + 2 * channels] + (partials[at + channels] - mean) ** 2 * partials[at]
        variance = squares / rows
        means[j], variances[j], inv_stds[j] = mean, variance, 1 / math.sqrt(variance + eps)
