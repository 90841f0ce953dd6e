"""Tiles of the rows of a pixel matrix."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._tensors import device_type

TILE_BYTES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""The largest result of a tile: it must fit a CPU's cache, or be large enough to occupy a whole GPU."""

SMALL_TILE = 1 / 16
"""The fraction of `TILE_BYTES` below which an operation mostly takes the time of its call."""

META_TILES = 3
"""The most tiles of a matrix on the meta device."""


def tile_bytes_for(values: Tensor) -> int:
    return TILE_BYTES["cpu" if device_type(values) == "cpu" else "cuda"]


def tiles(values: Tensor, dtype: torch.dtype, multiple_of: int = 1) -> Sequence[slice]:
    """Tiles of rows: as many rows as fit `TILE_BYTES` in `dtype`, rounded down to a multiple of `multiple_of`, at least
    one."""
    num_rows, channels = values.shape
    tile_rows = max(1, tile_bytes_for(values) // (channels * dtype.itemsize * multiple_of)) * multiple_of
    return slices(num_rows, tile_rows, values)


def slices(count: int, step: int, values: Tensor) -> list[slice]:
    """Slices of `step` of `count` things; one empty slice if there are none.

    On the meta device more than `META_TILES` are cut to the first two and the last; all between allocate alike.
    """
    starts: Sequence[int] = range(0, max(1, count), max(1, step))
    if values.is_meta and len(starts) > META_TILES:
        starts = *starts[:2], starts[-1]
    return [slice(start, min(start + max(1, step), count)) for start in starts]


def in_tiles(operation: Callable[[Tensor, Tensor], Any], values: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """operation(values, out), an elementwise one with arithmetic in `dtype`. Where the values have another, a CPU's
    operation converts whole matrices first: it is applied to tiles of rows."""
    converts = values.dtype is not dtype and device_type(values) == "cpu"
    for tile in tiles(values, dtype) if converts else [slice(None)]:
        operation(values[tile], out[tile])
    return out


def is_small(values: Tensor, dtype: torch.dtype) -> bool:
    return values.numel() * dtype.itemsize <= SMALL_TILE * tile_bytes_for(values)
