"""The number of threads of a kernel, the rows of their tiles, and the layout of the kernel's scratch memory."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import conv_sizes
from ..compiler.compilation import ARITHMETIC
from ..kernels.gemm import TILE_MULTIPLE
from ..kernels.memory import CACHE_LINE_BYTES, buffer_stride, padded_stride, whole_panels
from ..kernels.statistics import STATISTICS_ROWS
from .launch import product_of

TILE = 192
"""The most rows of a tile: enough for an efficient matrix product, few enough for the caches."""

TILE_BYTES = 1 << 21
"""The most bytes of a tile's scratch, unless a quarter of `TILE` rows needs more."""

PACKED_VALUES = 1 << 14
"""The values of a weight for which another thread is worth it, even if they are multiplied by few rows."""

PACKING_ROWS = 64
"""The rows whose product with a weight takes the time of packing it."""

_FLOAT64_BYTES = 8
"""Partial sums are in float64."""


class Tiles(NamedTuple):
    """The scratch memory begins with `thread_stride` elements for each thread's tiles. The other fields, from `panels`
    to `grad_vectors`, are the byte offsets of the other temporaries."""

    threads: int
    rows: int
    thread_stride: int
    panels: int
    next_panels: int
    partials: int
    grad_weight: int
    vectors: int
    next_vectors: int
    grad_vectors: int
    scratch_bytes: int


def for_statistics(values: Tensor) -> Tiles:
    rows, channels = values.shape
    threads = _num_threads(rows)
    return _tiles(threads, _tile_rows(threads, rows), partials=STATISTICS_ROWS * channels)


def for_grad_input(values: Tensor) -> Tiles:
    rows, channels = values.shape
    return _tiles(_num_threads(rows), rows, ARITHMETIC[values.dtype].itemsize, grad_vectors=2 * channels)


def for_affine_backward(values: Tensor) -> Tiles:
    (rows, channels), itemsize = values.shape, ARITHMETIC[values.dtype].itemsize
    threads = _num_threads(rows)
    row_bytes = padded_stride(channels, itemsize) * itemsize
    return _tiles(threads, _tile_rows(threads, rows, row_bytes), partials=2 * channels)


def halo(shape: torch.Size, dilation: int) -> int:
    """The number of rows before and after a row on which the output of a 3×3 convolution depends: the distance of the
    farthest tap, in pixels, is a pixel plus a row of pixels plus a plane."""
    return dilation * (1 + sum(shape[1:][-i:].numel() for i in range(1, len(shape) - 1)))


def for_forward(rows: int, weight: Tensor, has_statistics: bool, window: int = 1, halo: int = 0) -> Tiles:
    """The tiles of `rows` rows of the input of a convolution's forward. With a halo, products for all taps come first,
    of a halo more than a tile needs: once for so many rows, what the next tile needs is copied to the front.

    Two neighboring threads both compute the halo between them: fewer threads run if it exceeds a quarter of a thread's
    rows, to which packing adds. A narrow output is rounded from a buffer: of the product or, with a halo, of one row's
    sums. A pooled row of narrow operands is rounded from a buffer too.
    """
    itemsize, operand_itemsize = _itemsizes(weight)
    out_channels, in_channels, taps = conv_sizes(weight)
    columns, is_narrow = whole_panels(taps * out_channels, itemsize), weight.itemsize < itemsize
    threads = min(_num_threads(rows, weight), max(1, (rows + PACKING_ROWS) // (4 * halo or 1)))
    per_row = padded_stride(in_channels, operand_itemsize) * operand_itemsize // itemsize
    row_sums = _pooled_row(in_channels, itemsize, operand_itemsize, window)
    if halo:
        per_row, row_sums = per_row + columns, whole_panels(out_channels, itemsize) if is_narrow else 0
    elif is_narrow:
        per_row += padded_stride(columns, itemsize)
    tile_rows = _tile_rows(threads, rows, per_row * itemsize, window)
    return _tiles(
        *(threads, tile_rows, itemsize, tile_rows * per_row + 3 * halo * columns + row_sums),
        panels=in_channels * columns,
        partials=STATISTICS_ROWS * out_channels if has_statistics else 0,
        vectors=2 * in_channels,
    )


def for_backward(
    rows: int, weight: Tensor, needs_grad_weight: bool, window: int = 1, next_weight: Tensor | None = None
) -> Tiles:
    """The tiles of `rows` rows of the input of a convolution's backward, and of the next bottleneck if there is one,
    whose weight is no larger."""
    itemsize, operand_itemsize = _itemsizes(weight)
    out_channels, in_channels, taps = conv_sizes(weight)
    columns, in_columns = (whole_panels(each, itemsize) for each in (taps * out_channels, in_channels))
    threads = _num_threads(rows, weight)
    strides = ((padded_stride(each, itemsize), padded_stride(each, operand_itemsize)) for each in (columns, in_columns))
    per_row = sum(buffer_stride(*each, itemsize // operand_itemsize) for each in strides)
    tile_rows = _tile_rows(threads, rows, per_row * itemsize, window)
    row_sums = _pooled_row(in_channels, itemsize, operand_itemsize, window)
    next_out_channels, next_channels = (0, 0) if next_weight is None else next_weight.shape
    return _tiles(
        *(threads, tile_rows, itemsize, tile_rows * per_row + row_sums),
        panels=taps * out_channels * in_columns,
        next_panels=next_channels * whole_panels(next_out_channels, itemsize),
        partials=2 * in_channels,
        grad_weight=in_channels * columns if needs_grad_weight else 0,
        vectors=2 * in_channels,
        next_vectors=2 * next_channels,
        grad_vectors=2 * out_channels,
    )


def _itemsizes(weight: Tensor) -> tuple[int, int]:
    """The itemsizes of the arithmetic's dtype and of the operands of products."""
    return ARITHMETIC[weight.dtype].itemsize, product_of(weight.dtype).operand.itemsize


def _num_threads(rows: int, weight: Tensor | None = None) -> int:
    """The number of threads: at most one for each tile, or for few rows each part of a weight that they pack."""
    parts = 0 if weight is None else min(rows, weight.numel() // PACKED_VALUES)
    return max(1, min(torch.get_num_threads(), max(-(-rows // TILE), parts)))


def _pooled_row(in_channels: int, itemsize: int, operand_itemsize: int, window: int) -> int:
    """The buffer of a row that is pooled in the dtype of the arithmetic and then rounded to operands."""
    return whole_panels(in_channels, itemsize) if window > 1 and operand_itemsize < itemsize else 0


def _tile_rows(threads: int, rows: int, row_bytes: int = 0, window: int = 1) -> int:
    """The rows of a tile: as many of `row_bytes` bytes as fit the cache; with a `window` of pixels, rows of the pooled
    output."""
    in_cache = max(TILE // 4, TILE_BYTES // (row_bytes or 1))
    tile_rows = min(TILE, in_cache, rows // (4 * threads) + 8) // window  # few rows need little scratch
    return max(1, -(-tile_rows // TILE_MULTIPLE)) * TILE_MULTIPLE


def _tiles(
    threads: int,
    rows: int,
    itemsize: int = 1,
    thread_stride: int = 0,
    *,
    panels: int = 0,
    next_panels: int = 0,
    partials: int = 0,
    grad_weight: int = 0,
    vectors: int = 0,
    next_vectors: int = 0,
    grad_vectors: int = 0,
) -> Tiles:
    """The tiles with their byte offsets, from sizes in elements; `partials` and `grad_weight` are for each thread."""
    tiles = threads * thread_stride + TILE_MULTIPLE  # products read up to TILE_MULTIPLE elements beyond the tiles
    _, *places = _places(
        *(tiles * itemsize, panels * itemsize, next_panels * itemsize),
        *(threads * partials * _FLOAT64_BYTES, threads * grad_weight * itemsize),
        *(vectors * itemsize, next_vectors * itemsize, grad_vectors * itemsize),
    )
    return Tiles(threads, rows, thread_stride, *places)


def _places(*sizes: int) -> list[int]:
    """The offsets of consecutive buffers of these sizes, each in whole cache lines, and the end of the last buffer."""
    lines = (-(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES for size in sizes)
    return list(itertools.accumulate(lines, initial=0))
