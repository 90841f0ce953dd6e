"""Matrix products of a tile, and the packing of weights for them.

Products are made here because a tile's are so small that what a BLAS does before each takes a good part of its time.
"""

import math

from .compilation import subroutine
from .intrinsics import compiled
from .memory import PANEL_BYTES, elements, itemsize, panel_columns
from .micro_kernel import HAS_AVX512, edge_block, register_block, register_blocks
from .threads import partition

TILE_MULTIPLE = math.lcm(*register_blocks(HAS_AVX512).values())
"""A tile's buffers have rows for whole register blocks of any kind."""

_K_BLOCK = 256
"""So many terms of a sum are added at once: a panel of as many rows stays in the first-level cache."""

_M_BLOCK = 96
"""So many rows of C are computed for one panel after another, while their part of A stays in a cache: a multiple of
every MR."""

TRANSPOSE_BLOCK = 64
"""So many channels of a weight are transposed at once, while what is read stays in a cache."""


def _row_of_blocks(panels: int, blocks: dict[int, int]):
    """What computes `m` rows and up to so many panels of columns of C, one register block after another. Strides are in
    bytes."""
    if panels not in blocks:
        return None
    rows = blocks[panels]
    block, edge = register_block(rows, panels), edge_block(max(mr * nr for nr, mr in blocks.items()))

    @compiled
    def row_of_blocks(m, n, k, a, a_row, a_column, b, b_row, b_panel, accumulate, c, c_row, zero):
        width, buffer = PANEL_BYTES // itemsize(zero), edge(zero)
        for top in range(0, m, rows):
            count, out = min(rows, m - top), c + top * c_row
            whole = count == rows and n == panels * width
            target = (accumulate, out, c_row) if whole else (False, buffer, panels * PANEL_BYTES)
            block(a + top * a_row, a_row, a_column, k, b, b_row, b_panel, *target, zero)
            if not whole:
                for i in range(count):
                    output = elements(out + i * c_row, 0, n, zero)
                    computed = elements(buffer, i * panels * width, n, zero)
                    for j in range(n):
                        output[j] = computed[j] + (output[j] if accumulate else zero)

    return row_of_blocks


def make_gemm(avx512: bool):
    """The GEMM for processors with AVX-512's registers or with fewer. `gemm` documents its parameters."""
    one, two, three = (_row_of_blocks(panels, register_blocks(avx512)) for panels in (1, 2, 3))

    @compiled
    def product(m, n, k, a, a_row, a_column, b, b_row, accumulate, c, c_row, zero):
        size = itemsize(zero)
        width = PANEL_BYTES // size
        b_row, b_panel = (b_row * size, PANEL_BYTES) if b_row else (PANEL_BYTES, k * PANEL_BYTES)
        a_row, a_column, c_row = a_row * size, a_column * size, c_row * size
        for start in range(0, k, _K_BLOCK):
            depth, adds = min(_K_BLOCK, k - start), accumulate or start > 0
            for first in range(0, m, _M_BLOCK):
                rows, left = min(_M_BLOCK, m - first), 0
                while left < n:
                    panels = -(-(n - left) // width)
                    of_a, of_b = a + first * a_row + start * a_column, b + start * b_row + left // width * b_panel
                    out = c + first * c_row + left * size
                    if avx512 and panels > 2 and panels != 4:
                        columns = min(3 * width, n - left)
                        three(rows, columns, depth, of_a, a_row, a_column, of_b, b_row, b_panel, adds, out, c_row, zero)
                    elif avx512 and panels > 1:
                        columns = min(2 * width, n - left)
                        two(rows, columns, depth, of_a, a_row, a_column, of_b, b_row, b_panel, adds, out, c_row, zero)
                    else:
                        columns = min(width, n - left)
                        one(rows, columns, depth, of_a, a_row, a_column, of_b, b_row, b_panel, adds, out, c_row, zero)
                    left += columns

    return product


_product = make_gemm(HAS_AVX512)


@subroutine(integers=11)
def gemm(m, n, k, a, a_row, a_column, b, b_row, accumulate, c, c_row, zero):
    """C (m, n) = A (m, k) @ B (k, n), or C += A @ B.

    a, b and c are addresses; strides are in elements. A may be transposed (`a_row` = 1). B's row stride is 0 where B is
    packed in panels. B is read by whole panels and A by whole register blocks: both must lie in memory that goes on
    after them, whatever is there. Exactly m × n elements of C are written.

    Kernels call it by its address, so that it is compiled once and not as a part of each.
    """
    _product(m, n, k, a, a_row, a_column, b, b_row, accumulate != 0, c, c_row, zero)


@compiled
def pack_weight(weight, thread, threads, zero):
    """Pack a weight (out_channels, in_channels, taps) into panels, this thread's input channels of it.

    Forward, B is (in_channels, taps · out_channels). Transposed, for the gradient of the input, it is
    (taps · out_channels, in_channels), its taps in reverse. A panel holds `PANEL_BYTES` of every row, one row after
    another; the last one is padded with zeros. The transposition goes by blocks of `TRANSPOSE_BLOCK` channels.
    """
    channels, width, taps = weight.in_channels, weight.out_channels, weight.taps
    panel = PANEL_BYTES // itemsize(zero)
    rows, columns = (taps * width, channels) if weight.transposed else (channels, taps * width)
    first, last = partition(channels, thread, threads)
    values = elements(weight.weight, 0, width * channels * taps, weight.element)
    packed = elements(weight.panels, 0, rows * panel_columns(columns, zero), zero)
    for start in range(first, last, TRANSPOSE_BLOCK):
        stop = min(start + TRANSPOSE_BLOCK, last)
        for k in range(taps):
            for o in range(width):
                at, row, column = o * channels * taps + k, (taps - 1 - k) * width + o, k * width + o
                to = column // panel * rows * panel + column % panel
                if weight.transposed:
                    for c in range(start, stop):
                        packed[(c // panel * rows + row) * panel + c % panel] = values[at + c * taps]
                else:
                    for c in range(start, stop):
                        packed[to + c * panel] = values[at + c * taps]
    if thread == 0 and columns % panel:
        for row in range(rows):
            for column in range(columns % panel, panel):
                packed[(columns // panel * rows + row) * panel + column] = 0
