"""The GEMM of bfloat16 pairs by AMX's tile registers: four hold a (32, 32) block of C, two hold tiles of A and two of
B.

All tiles are full: the edges of A and B are copied to buffers padded with zeros, and an edge of C is computed in a
buffer. A transposed A is always copied, since a tile's cells are pairs of a row.
"""

from types import ModuleType

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..compiler.compilation import subroutine
from ..compiler.intrinsics import compiled, stack_bytes
from . import amx
from .amx import TILE_ROWS
from .memory import PANEL_BYTES, elements

_BLOCK = 2 * TILE_ROWS
"""Rows and columns of C that are computed at once."""

_K_BLOCK = 256
"""The number of cells of a sum that are multiplied at once: this part of A's rows stays in the L1 cache."""

_CELL_BYTES = 4
_A_STRIDE = (_K_BLOCK + TILE_ROWS) * _CELL_BYTES
_C_STRIDE = _BLOCK * _CELL_BYTES

_a_buffer, _b_buffer, _c_buffer = (
    stack_bytes(count) for count in (_BLOCK * _A_STRIDE, _BLOCK * PANEL_BYTES, _BLOCK * _C_STRIDE)
)


@intrinsic
def _transpose(typingctx, source, source_stride, target, target_stride):
    """The transpose of 16 × 16 cells, in registers: after step s, all blocks of 2s × 2s are transposed."""

    def codegen(context, builder, signature, args):
        vector, lanes = ir.VectorType(ir.IntType(32), TILE_ROWS), range(TILE_ROWS)
        masks = ir.VectorType(ir.IntType(32), TILE_ROWS)

        def row(start, stride, i):
            address = builder.add(start, builder.mul(stride, ir.Constant(stride.type, i)))
            return builder.inttoptr(address, vector.as_pointer())

        rows = [builder.load(row(args[0], args[1], i), align=_CELL_BYTES) for i in lanes]
        step = 1
        while step < TILE_ROWS:
            upper = ir.Constant(masks, [j + TILE_ROWS - step if j & step else j for j in lanes])
            lower = ir.Constant(masks, [j + TILE_ROWS if j & step else j + step for j in lanes])
            for i in (i for i in lanes if not i & step):
                pair = rows[i], rows[i + step]
                rows[i], rows[i + step] = (builder.shuffle_vector(*pair, mask) for mask in (upper, lower))
            step *= 2
        for i, value in enumerate(rows):
            builder.store(value, row(args[2], args[3], i), align=_CELL_BYTES)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen


@compiled
def _copy_cells(source, row, column, rows, columns, target, target_stride, padded_rows):
    """Copy cells (rows, columns) of a matrix whose strides are in bytes, with zeros up to `padded_rows` rows and to
    whole tiles of columns. The target's rows are contiguous."""
    padded_columns = (columns + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    for top in range(0, padded_rows, TILE_ROWS):
        for left in range(0, padded_columns, TILE_ROWS):
            place, at = target + top * target_stride + left * _CELL_BYTES, source + top * row + left * column
            if column != _CELL_BYTES and top + TILE_ROWS <= rows and left + TILE_ROWS <= columns:
                _transpose(at, column, place, target_stride)
            else:
                for i in range(TILE_ROWS):
                    cells = elements(place + i * target_stride, 0, TILE_ROWS, np.int32(0))
                    for j in range(TILE_ROWS):
                        is_inside = top + i < rows and left + j < columns
                        cells[j] = elements(at + i * row + j * column, 0, 1, np.int32(0))[0] if is_inside else 0


def make_gemm(tiles: ModuleType):
    """The GEMM with the tile registers of `tiles`: `amx`, or an emulation of it. `gemm.gemm` documents its
    parameters."""
    clear, load, store, multiply_add = tiles.clear, tiles.load, tiles.store, tiles.multiply_add
    configure, release = tiles.configure, tiles.release

    @compiled
    def multiply_step(two_rows, two_columns, a, a_row, b, b_row, b_panel):
        """The sums' tiles 0 and 1, and 2 and 3 below them, += A's tiles 4 and 5 @ B's tiles 6 and 7."""
        load(4, a, a_row)
        load(6, b, b_row)
        multiply_add(0, 4, 6)
        if two_columns:
            load(7, b + b_panel, b_row)
            multiply_add(1, 4, 7)
        if two_rows:
            load(5, a + TILE_ROWS * a_row, a_row)
            multiply_add(2, 5, 6)
            if two_columns:
                multiply_add(3, 5, 7)

    @compiled
    def block(two_rows, two_columns, k, whole, a, a_row, a_padded, b, b_row, b_panel, b_padded, accumulate, c, c_row):
        """A block of C with one or two tiles of rows, and of columns. `a_padded` has A's cells from `whole` on,
        `b_padded` B's last rows of cells if they are fewer than a tile's."""
        if accumulate:
            load(0, c, c_row)
            load(1, c + two_columns * PANEL_BYTES, c_row)
            load(2, c + two_rows * TILE_ROWS * c_row, c_row)
            load(3, c + two_rows * TILE_ROWS * c_row + two_columns * PANEL_BYTES, c_row)
        else:
            clear(0)
            clear(1)
            clear(2)
            clear(3)
        for start in range(0, k, TILE_ROWS):
            is_whole, rest = start < whole, a_padded + (start - whole) * _CELL_BYTES
            a_block, a_stride = (a + start * _CELL_BYTES, a_row) if is_whole else (rest, _A_STRIDE)
            if start + TILE_ROWS <= k:
                multiply_step(two_rows, two_columns, a_block, a_stride, b + start * b_row, b_row, b_panel)
            else:
                multiply_step(two_rows, two_columns, a_block, a_stride, b_padded, PANEL_BYTES, TILE_ROWS * PANEL_BYTES)
        store(0, c, c_row)
        if two_columns:
            store(1, c + PANEL_BYTES, c_row)
        if two_rows:
            store(2, c + TILE_ROWS * c_row, c_row)
            if two_columns:
                store(3, c + TILE_ROWS * c_row + PANEL_BYTES, c_row)

    @compiled
    def row_of_blocks(rows, n, k, a, a_row, a_column, b, b_row, b_panel, accumulate, c, c_row, zero):
        """At most 32 rows of C, with at most `_K_BLOCK` cells of each sum."""
        a_padded, b_padded, edge = _a_buffer(zero), _b_buffer(zero), _c_buffer(zero)
        two_rows, tile_k = rows > TILE_ROWS, k // TILE_ROWS * TILE_ROWS
        whole = tile_k if a_column == _CELL_BYTES and rows % TILE_ROWS == 0 else 0
        padded_rows = 2 * TILE_ROWS if two_rows else TILE_ROWS
        _copy_cells(a + whole * a_column, a_row, a_column, rows, k - whole, a_padded, _A_STRIDE, padded_rows)
        for left in range(0, n, _BLOCK):
            columns = min(_BLOCK, n - left)
            two_columns, b_block, out = columns > TILE_ROWS, b + left // TILE_ROWS * b_panel, c + left * _CELL_BYTES
            for panel in range((columns + TILE_ROWS - 1) // TILE_ROWS if tile_k < k else 0):
                last, rest = b_block + panel * b_panel + tile_k * b_row, b_padded + panel * TILE_ROWS * PANEL_BYTES
                _copy_cells(last, b_row, _CELL_BYTES, k - tile_k, TILE_ROWS, rest, PANEL_BYTES, TILE_ROWS)
            is_edge = rows % TILE_ROWS or columns % TILE_ROWS
            target = (False, edge, _C_STRIDE) if is_edge else (accumulate, out, c_row)
            block(two_rows, two_columns, k, whole, a, a_row, a_padded, b_block, b_row, b_panel, b_padded, *target)
            for i in range(rows if is_edge else 0):
                output = elements(out + i * c_row, 0, columns, zero)
                computed = elements(edge + i * _C_STRIDE, 0, columns, zero)
                for j in range(columns):
                    output[j] = computed[j] + (output[j] if accumulate else zero)

    @compiled
    def gemm(m, n, k, a, a_row, a_column, b, b_row, accumulate, c, c_row, zero):
        b_row, b_panel = (b_row * _CELL_BYTES, PANEL_BYTES) if b_row else (PANEL_BYTES, k * PANEL_BYTES)
        a_row, a_column, c_row = a_row * _CELL_BYTES, a_column * _CELL_BYTES, c_row * _CELL_BYTES
        configure()
        for start in range(0, k, _K_BLOCK):
            depth, adds = min(_K_BLOCK, k - start), accumulate or start > 0
            for top in range(0, m, _BLOCK):
                a_block, b_block, rows = a + top * a_row + start * a_column, b + start * b_row, min(_BLOCK, m - top)
                out = c + top * c_row
                row_of_blocks(rows, n, depth, a_block, a_row, a_column, b_block, b_row, b_panel, adds, out, c_row, zero)
        release()

    return gemm


_product = make_gemm(amx)


@subroutine(integers=11)
def gemm_amx(m, n, k, a, a_row, a_column, b, b_row, accumulate, c, c_row, zero):
    """`gemm.gemm_bfloat16` by AMX. It releases the thread's tile registers at the end."""
    _product(m, n, k, a, a_row, a_column, b, b_row, accumulate != 0, c, c_row, zero)
