"""Splits of the rows among program instances, by counting."""

import math

import pytest

pytest.importorskip("triton", reason="needs Triton")

from efficient_densenet.kernels.triton_gpu.host.tiles import (
    DeviceLimits,
    Precision,
    backward_tile,
    forward_tile,
    row_splits,
)

SIZES = [
    (num_rows, block_rows, channel_tiles, resident)
    for num_rows in (1, 63, 64, 65, 3136, 262144)
    for block_rows in (32, 64)
    for channel_tiles in (1, 3, 16, 300)
    for resident in (1, 4, 264)
]


@pytest.mark.parametrize("overhead", [0.5, 3.0])
def test_no_more_than_two_waves_and_no_empty_split(overhead):
    for num_rows, block_rows, channel_tiles, resident in SIZES:
        splits = row_splits(num_rows, block_rows, channel_tiles, resident, overhead)
        row_tiles = math.ceil(num_rows / block_rows)
        assert 1 <= splits <= row_tiles
        assert splits == 1 or splits * channel_tiles <= 2 * resident
        assert (splits - 1) * math.ceil(row_tiles / splits) < row_tiles


def test_the_fewest_splits_of_the_shortest_time():
    """132 splits would each have 32 row tiles or one less: as many come in 128. One wave of 199 has room for one split
    of each of 100 channel tiles, three row tiles long: two waves are shorter."""
    assert row_splits(262144, 64, 2, 264, 1.5) == 128
    assert row_splits(3 * 64, 64, 100, 199, 0.1) == 3


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("width", [1, 16, 48, 64, 100, 128, 160, 192, 256])
def test_a_tile_fits_the_smallest_device_that_has_its_precision(precision, width):
    """64 KiB of shared memory are compute capability 7.5's, 99 those of 8.6, 8.9 and 12.0."""
    kib = 99 if precision is Precision.TF32 else 64
    limits = DeviceLimits(40, kib * 1024, kib * 1024)
    tile = forward_tile(width, precision, limits)
    assert tile.forward_shared_memory(precision) <= limits.shared_memory_of_a_block
    assert tile.out_channels >= width
    tile = backward_tile(width, precision, limits)
    assert tile.backward_shared_memory(precision) <= limits.shared_memory_of_a_block
    assert tile.out_channels + tile.rest >= width
