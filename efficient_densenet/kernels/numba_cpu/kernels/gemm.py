"""Matrix products of a tile, and the packing of weights for them.

A tile's products are too small for a BLAS: its overhead for each call would take a large part of the time.
"""

import math

from ..compiler.compilation import subroutine
from ..compiler.intrinsics import compiled, pointer, stack_bytes
from ..compiler.processor import has
from .memory import PANEL_BYTES, cells, elements, itemsize, panel_columns, vnni_factor
from .micro_kernel import register_block, register_blocks
from .threads import partition

_HAS_AVX512 = has("avx512")

TILE_MULTIPLE = math.lcm(*register_blocks(_HAS_AVX512).values())
"""A tile's buffers have rows for whole register blocks of any kind."""

_K_BLOCK = 256
"""The number of terms of a sum that are added at once: a panel of this many rows stays in the L1 cache."""

_M_BLOCK = 96
"""The number of rows of C that are computed for one panel after another, while their part of A stays in a cache: a
multiple of every MR."""


def _row_of_blocks(panels: int, blocks: dict[int, int], pairs: bool):
    """A function that computes `m` rows and up to `panels` panels of columns of C, one register block after another.
    Strides are in bytes."""
    if panels not in blocks:
        return None
    rows = blocks[panels]
    block, edge = (
        register_block(rows, panels, pairs),
        stack_bytes(PANEL_BYTES * max(mr * nr for nr, mr in blocks.items())),
    )

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


def make_gemm(avx512: bool, pairs: bool = False):
    """The GEMM for processors with AVX-512's registers, or with AVX2's. `gemm` documents its parameters. With `pairs`,
    a cell is a pair of bfloat16s."""
    one, two, three = (_row_of_blocks(panels, register_blocks(avx512), pairs) for panels in (1, 2, 3))

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
                    taken = 3 if avx512 and panels > 2 and panels != 4 else 2 if avx512 and panels > 1 else 1
                    columns, a_block = min(taken * width, n - left), a + first * a_row + start * a_column
                    b_block, out = b + start * b_row + left // width * b_panel, c + first * c_row + left * size
                    operands = a_block, a_row, a_column, b_block, b_row, b_panel, adds, out, c_row
                    if avx512 and taken == 3:
                        three(rows, columns, depth, *operands, zero)
                    elif avx512 and taken == 2:
                        two(rows, columns, depth, *operands, zero)
                    else:
                        one(rows, columns, depth, *operands, zero)
                    left += columns

    return product


_product = make_gemm(_HAS_AVX512)
_product_of_pairs = make_gemm(avx512=True, pairs=True)


@subroutine(integers=11)
def gemm(m, n, k, a, a_row, a_column, b, b_row, accumulate, c, c_row, zero):
    """C (m, n) = A (m, k) @ B (k, n), or C += A @ B.

    a, b and c are addresses. A and B consist of cells, each as wide as an element of C and here one element; k and all
    strides count them. A may be transposed (`a_row` = 1). B's row stride is 0 if B is packed in panels. B is read by
    whole panels and A by whole register blocks: the memory after both must be readable, whatever it contains. Exactly m
    × n elements of C are written.

    Kernels call the GEMM by its address, so that it is compiled once and not as a part of each kernel.
    """
    _product(m, n, k, a, a_row, a_column, b, b_row, accumulate != 0, c, c_row, zero)


@subroutine(integers=11)
def gemm_bfloat16(m, n, k, a, a_row, a_column, b, b_row, accumulate, c, c_row, zero):
    """`gemm` by AVX512-BF16: a cell is a pair of bfloat16s that are adjacent in the sum, and C is float32."""
    _product_of_pairs(m, n, k, a, a_row, a_column, b, b_row, accumulate != 0, c, c_row, zero)


@compiled
def pack_weight(weight, thread, threads, zero):
    """Pack a weight (out_channels, in_channels, taps) into panels of operands, for this thread's input channels.

    Forward, B is (in_channels, taps · out_channels). Transposed, for the gradient of the input, it is
    (taps · out_channels, in_channels), its taps in reverse. A panel holds `PANEL_BYTES` of every row of cells, one row
    after another; cells beyond the last row and column are padded with zeros. The channels of one panel are packed at a
    time, for all taps: what is read and written for the next output channel is then in the L1 cache.
    """
    channels, width, taps, operand = weight.in_channels, weight.out_channels, weight.taps, weight.operand
    panel, factor = PANEL_BYTES // itemsize(zero), vnni_factor(operand, zero)
    rows, columns = (taps * width, channels) if weight.transposed else (channels, taps * width)
    cell_rows = cells(rows, operand, zero)
    first, last = partition(channels, thread, threads)
    packed, start = pointer(weight.panels, 0, operand), first
    while start < last:
        stop = min((start // panel + 1) * panel, last)
        for o in range(width):
            for k in range(taps):
                row, column = (taps - 1 - k) * width + o, k * width + o
                values = pointer(weight.weight, (o * channels + start) * taps + k, weight.element)
                if weight.transposed:
                    to = (start // panel * cell_rows + row // factor) * panel + start % panel
                    for c in range(stop - start):
                        packed[(to + c) * factor + row % factor] = values[c * taps]
                else:
                    to = column // panel * cell_rows * panel + column % panel
                    for c in range(start, stop):
                        packed[(to + c // factor * panel) * factor + c % factor] = values[(c - start) * taps]
        start = stop
    if thread == 0:
        for row in range(cell_rows * factor):
            for column in range(columns if row < rows else 0, panel_columns(columns, zero)):
                to = (column // panel * cell_rows + row // factor) * panel + column % panel
                packed[to * factor + row % factor] = 0.0
