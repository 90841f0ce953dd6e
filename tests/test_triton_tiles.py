"""Splits of the rows among program instances, by counting."""

import math

import pytest

pytest.importorskip("triton", reason="needs Triton")

from efficient_densenet.engines.kernels.triton_gpu.tiles import row_splits  # noqa: E402

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


def test_one_full_wave_where_there_are_many_rows():
    assert row_splits(262144, 64, 2, 264, 1.5) == 132


def test_two_waves_where_one_would_leave_half_the_device_idle():
    """Three row tiles of 90 channel tiles on 180 places: two splits in one wave would take two row tiles' time."""
    assert row_splits(3 * 64, 64, 90, 180, 0.1) in (2, 3)
