"""Tiles and splits of the Triton kernels of 1×1 convolutions, chosen from a device's own limits.

Everything but `device_limits` is a pure function of sizes, so that the choice for any device is tested without one.
"""

import functools
import math
from typing import NamedTuple

import torch

KIB = 1024


class DeviceLimits(NamedTuple):
    """What a kernel's launch may count on. Bytes of shared memory are of a multiprocessor, and of a block."""

    multiprocessors: int
    shared_memory: int
    shared_memory_of_a_block: int


WITHOUT_DEVICE = DeviceLimits(multiprocessors=2, shared_memory=64 * KIB, shared_memory_of_a_block=64 * KIB)
"""For Triton's interpreter: few multiprocessors, so that the loops over rows go round."""


class Tile(NamedTuple):
    """The tile of a program instance: rows × input channels, and all of a launch's output channels."""

    rows: int
    channels: int
    out_channels: int
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        """The tile as constants and options of a launch."""
        blocks = {"BLOCK_ROWS": self.rows, "BLOCK_CHANNELS": self.channels, "BLOCK_OUT": self.out_channels}
        return {**blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a device, read once."""
    if device.type != "cuda":
        return WITHOUT_DEVICE
    properties = torch.cuda.get_device_properties(device)
    of_a_block = properties.shared_memory_per_block_optin
    return DeviceLimits(properties.multi_processor_count, properties.shared_memory_per_multiprocessor, of_a_block)


@functools.lru_cache(maxsize=4096)
def row_splits(num_rows: int, block_rows: int, channel_tiles: int, resident: int, overhead: float) -> int:
    """Among how many program instances each the row tiles of a channel tile are divided.

    All instances are resident at once, one wave of `resident` ones, or come in two, whichever is shorter: a wave takes
    as long as its instances' row tiles, and `overhead` row tiles more for reading a weight and storing partial sums.
    """
    row_tiles = max(1, -(-num_rows // block_rows))
    best, shortest = 1, math.inf
    for waves in (1, 2):
        most = max(1, min(row_tiles, waves * resident // channel_tiles))
        tiles_of_each = -(-row_tiles // most)
        splits = -(-row_tiles // tiles_of_each)
        duration = -(-splits * channel_tiles // resident) * (tiles_of_each + overhead)
        if duration < shortest:
            best, shortest = splits, duration
    return best
