"""Tiles and splits of the Triton kernels of 1×1 convolutions, chosen from a device's own limits.

Everything but `device_limits` is a pure function of sizes, so that the choice for any device is tested without one.
"""

import enum
import functools
import math
from typing import NamedTuple

import torch

KIB = 1024
RESERVED_SHARED_MEMORY = KIB
"""The bytes of shared memory that CUDA reserves in each block."""

BARRIER_BYTES = 8
"""Shared memory of a block that the tensor cores of compute capability 10.0 need beside the operands."""


class Precision(enum.Enum):
    """The arithmetic of products, "ieee" without tensor cores. Sums are in float32."""

    HALF = "half"
    TF32 = "tf32"
    IEEE = "ieee"

    @property
    def input_precision(self) -> str:
        """The argument `input_precision` of `tl.dot`, which ignores it for operands in half precision."""
        return "tf32" if self is Precision.TF32 else "ieee"

    @property
    def itemsize(self) -> int:
        return 2 if self is Precision.HALF else 4


class DeviceLimits(NamedTuple):
    """The resources that a launch can use. Shared memory, of a multiprocessor and of a block, is in bytes."""

    multiprocessors: int
    shared_memory: int
    shared_memory_of_a_block: int
    has_tf32: bool = True


WITHOUT_DEVICE = DeviceLimits(multiprocessors=1, shared_memory=164 * KIB, shared_memory_of_a_block=163 * KIB)
"""Limits for Triton's interpreter: one multiprocessor, so that the loops over rows have several iterations."""


OF_H100 = DeviceLimits(multiprocessors=132, shared_memory=228 * KIB, shared_memory_of_a_block=227 * KIB)


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a device, read once. The meta device has those of the current GPU, or of an H100."""
    if device.type == "meta":
        return device_limits(torch.device("cuda")) if torch.cuda.is_available() else OF_H100
    if device.type != "cuda":
        return WITHOUT_DEVICE
    properties = torch.cuda.get_device_properties(device)
    has_tf32 = properties.major >= 8
    # Older PyTorch versions lack these properties: assume the minimum of GPUs with this compute capability.
    of_a_block = getattr(properties, "shared_memory_per_block_optin", (99 if has_tf32 else 64) * KIB)
    shared_memory = getattr(properties, "shared_memory_per_multiprocessor", of_a_block + RESERVED_SHARED_MEMORY)
    return DeviceLimits(properties.multi_processor_count, shared_memory, of_a_block, has_tf32)


class Tile(NamedTuple):
    """The tile of a program instance: rows × input channels, and all output channels, in two parts.

    `max_registers` is the compiler's limit for a thread; with 128, a multiprocessor holds two blocks of 8 warps.
    """

    rows: int
    channels: int
    num_stages: int
    max_registers: int | None
    out_channels: int = 0
    rest: int = 0
    num_warps: int = 8

    def constants(self) -> dict[str, int]:
        """The tile as constants and options of a launch."""
        blocks = {"BLOCK_ROWS": self.rows, "BLOCK_CHANNELS": self.channels, "BLOCK_OUT": self.out_channels}
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return blocks | options | ({} if self.max_registers is None else {"maxnreg": self.max_registers})

    def forward_shared_memory(self, precision: Precision) -> int:
        """An upper bound in bytes, from the tiles of the operands in each stage."""
        stage = (self.rows + self.out_channels) * self.channels * precision.itemsize
        return max(self.num_stages * stage, self.rows * self.out_channels * 4) + BARRIER_BYTES

    def backward_shared_memory(self, precision: Precision) -> int:
        """An upper bound in bytes: the weight, and in each stage the input, the output and its grad_accum."""
        width = self.out_channels + self.rest
        stage = self.rows * (self.channels + 2 * width)
        weight = self.channels * width
        operands = (weight + self.num_stages * stage) * precision.itemsize
        return max(operands, self.out_channels * self.channels * 4) + BARRIER_BYTES

    def resident_blocks(self, shared_memory: int, limits: DeviceLimits) -> int:
        """The number of blocks of this tile that a multiprocessor holds."""
        two_fit = 2 * (shared_memory + RESERVED_SHARED_MEMORY) <= limits.shared_memory
        return 2 if self.max_registers == 128 and two_fit else 1


# Tiles that compile without spills for sm_75 to sm_120 (tests/test_triton_resources.py), the best first, the smallest
# last. Those of TF32 to 128 channels are a compromise of what was fast on an H100 (benchmarks/gpu_tiles.py). Those of
# half precision were never measured: they are TF32's, or issue fewer instructions for each value.
# The keys are the numbers of output channels of a tile.
FORWARD_TILES = {
    Precision.TF32: {
        64: [Tile(128, 32, 3, None, num_warps=4)],
        128: [Tile(64, 32, 3, None, num_warps=4)],
        256: [Tile(32, 16, 3, 128)],
    },
    Precision.HALF: {
        64: [Tile(128, 32, 3, None, num_warps=4)],
        128: [Tile(64, 32, 3, None, num_warps=4)],
        256: [Tile(32, 32, 3, 128)],
    },
    Precision.IEEE: {64: [Tile(64, 16, 1, 128)], 128: [Tile(32, 32, 1, 128)], 256: [Tile(16, 16, 1, 128)]},
}
BACKWARD_TILES = {
    Precision.TF32: {
        64: [Tile(16, 64, 3, 128)],
        128: [Tile(16, 64, 3, 128), Tile(16, 64, 2, 128)],
        256: [Tile(32, 64, 2, None), Tile(16, 64, 2, None), Tile(16, 32, 1, None)],
    },
    Precision.HALF: {
        64: [Tile(32, 64, 3, 128), Tile(16, 64, 2, 128)],
        128: [Tile(16, 64, 2, 128)],
        256: [Tile(32, 64, 2, None), Tile(16, 32, 1, None)],
    },
    Precision.IEEE: {
        64: [Tile(16, 64, 1, 128)],
        128: [Tile(32, 32, 1, 128)],
        256: [Tile(16, 16, 1, None)],
    },
}


def forward_tile(width: int, precision: Precision, limits: DeviceLimits) -> Tile:
    """The first tile that fits the device."""
    candidates = FORWARD_TILES[precision][_size_class(width)]
    tiles = [tile._replace(out_channels=_power_of_two(width)) for tile in candidates]
    return _first_that_fits([(tile, tile.forward_shared_memory(precision)) for tile in tiles], limits)


def backward_tile(width: int, precision: Precision, limits: DeviceLimits) -> Tile:
    """The first tile that fits the device."""
    out_channels = min(128, _power_of_two(width))
    rest = _power_of_two(width - out_channels) if width > out_channels else 0
    candidates = BACKWARD_TILES[precision][_size_class(width)]
    tiles = [tile._replace(out_channels=out_channels, rest=rest) for tile in candidates]
    return _first_that_fits([(tile, tile.backward_shared_memory(precision)) for tile in tiles], limits)


def backward_splits(num_rows: int, channel_tiles: int, tile: Tile, precision: Precision, limits: DeviceLimits) -> int:
    """The number of program instances that share the row tiles of a channel tile."""
    width = tile.out_channels + tile.rest
    blocks = tile.resident_blocks(tile.backward_shared_memory(precision), limits)
    bytes_of_a_row = (3 * tile.channels + 2 * width) * precision.itemsize
    bytes_beside_rows = 3 * width * tile.channels * 4  # the weight is read, its gradient stored and added up
    overhead = bytes_beside_rows / (tile.rows * bytes_of_a_row)
    return row_splits(num_rows, tile.rows, channel_tiles, blocks * limits.multiprocessors, overhead)


def row_splits(num_rows: int, block_rows: int, channel_tiles: int, resident: int, overhead: float) -> int:
    """Splits of the row tiles for the shortest time, and then for the fewest partial sums.

    The instances run in one or two waves of at most `resident` instances. A wave takes the time of one instance's row
    tiles, plus `overhead` row tiles for reading a weight and storing partial sums.
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


def _first_that_fits(candidates: list[tuple[Tile, int]], limits: DeviceLimits) -> Tile:
    """The first candidate that fits as often as its registers allow, or else the first that fits, or else the last. A
    tile uses all registers if a second block does not fit anyway, or where float16 is multiplied without tensor cores,
    which takes more of them."""
    fitting = [each for each in candidates if each[1] <= limits.shared_memory_of_a_block]
    as_often = (
        each for each in fitting if each[0].max_registers is None or each[0].resident_blocks(each[1], limits) > 1
    )
    tile, shared_memory = next(as_often, (fitting or candidates[-1:])[0])
    may_be_two = limits.has_tf32 and tile.resident_blocks(shared_memory, limits) > 1
    return tile if may_be_two else tile._replace(max_registers=None)


def _size_class(width: int) -> int:
    return 64 if width <= 64 else 128 if width <= 128 else 256


def _power_of_two(width: int) -> int:
    """The next power of two, at least 16, which `tl.dot` needs."""
    return max(16, 1 << (width - 1).bit_length())
