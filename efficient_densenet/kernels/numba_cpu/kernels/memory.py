"""Access to arrays, rows and scratch in kernels.

A kernel gets addresses as integers, and `zero`, the 0 of the dtype of its arithmetic, from which Numba infers the types
of sums and vectors. The matrices that a kernel is given may be narrower: each has an `element`, of which only the dtype
is used. The operands of products may be narrower too. The GEMM reads them as cells of one operand, or of a pair of
bfloat16s. Strides and offsets count elements unless stated otherwise.
"""

from numba import carray

from ..compiler.intrinsics import compiled, pointer, prefetch

CACHE_LINE_BYTES = 64

PANEL_BYTES = 64
"""The width of a packed panel: one AVX-512 vector, or two of AVX2."""

_PREFETCH_DISTANCE = 24
"""The rows between a row and the one that is prefetched meanwhile: the hardware does not predict short rows of a wider
matrix."""

_SHORT_ROW_BYTES = 1024


def padded_stride(count: int, itemsize: int) -> int:
    """A row stride for `count` elements: an odd number of cache lines, since rows whose distance is a power of two
    would compete for the same cache sets."""
    return (-(-count * itemsize // CACHE_LINE_BYTES) | 1) * CACHE_LINE_BYTES // itemsize


def whole_panels(columns: int, itemsize: int) -> int:
    """The number of columns, rounded up to whole panels."""
    panel = PANEL_BYTES // itemsize
    return -(-columns // panel) * panel


def buffer_stride(product: int, operands: int, factor: int) -> int:
    """The elements of scratch for each row of a buffer: enough for a row of operands and its half of two interleaved
    rows, or for a row of a product. `product` and `operands` are their strides, each in its own elements."""
    return product if factor == 1 else max(product, operands // factor + product // 2)


_padded_stride, _whole_panels = compiled(padded_stride), compiled(whole_panels)
_buffer_stride = compiled(buffer_stride)


@compiled
def elements(address, index, count, zero):
    """An array of `count` elements, the first of which is element `index` after the address."""
    return carray(pointer(address, index, zero), (count,))


@compiled
def row_of(matrix, row, left, count):
    """`count` elements of a row of a matrix, from column `left` on."""
    return elements(matrix.data, row * matrix.row_stride + left, count, matrix.element)


@compiled
def is_narrow(element, zero):
    """Whether numbers must be rounded before they are stored. This is a constant when LLVM compiles."""
    return itemsize(element) < itemsize(zero)


@compiled
def vnni_factor(operand, zero):
    """How many operands of a product are in a cell of its GEMM: one, or two bfloat16s that are adjacent in the sum."""
    return itemsize(zero) // itemsize(operand)


@compiled
def cells(count, operand, zero):
    """The number of cells that hold `count` operands."""
    factor = vnni_factor(operand, zero)
    return (count + factor - 1) // factor


@compiled
def itemsize(zero):
    return elements(0, 0, 1, zero).itemsize


@compiled
def offset(address, index, zero):
    """The address of element `index`."""
    return address + index * itemsize(zero)


@compiled
def stride_of(columns, zero):
    """`padded_stride` for `zero`'s dtype."""
    return _padded_stride(columns, itemsize(zero))


@compiled
def panel_columns(columns, zero):
    """`whole_panels` for `zero`'s dtype."""
    return _whole_panels(columns, itemsize(zero))


@compiled
def clear(address, count, zero):
    numbers = elements(address, 0, count, zero)
    for i in range(count):
        numbers[i] = 0.0


@compiled
def copy(source, destination, count, zero):
    """Copy from first to last: source and destination may overlap if the destination begins first."""
    source, destination = elements(source, 0, count, zero), elements(destination, 0, count, zero)
    for i in range(count):
        destination[i] = source[i]


@compiled
def convert(source, source_element, destination, destination_element, count):
    """Copy from one dtype to another. Source and destination must not overlap."""
    source = elements(source, 0, count, source_element)
    destination = elements(destination, 0, count, destination_element)
    for i in range(count):
        destination[i] = source[i]


@compiled
def buffer_stride_of(columns, operand, zero):
    """`buffer_stride` for the dtypes of `operand` and `zero`."""
    return _buffer_stride(stride_of(columns, zero), stride_of(columns, operand), vnni_factor(operand, zero))


@compiled
def pad_cells(matrix, rows, stride, columns, operand, zero):
    """Fill the rest of the last cell of each row with zeros."""
    for column in range(columns, cells(columns, operand, zero) * vnni_factor(operand, zero)):
        for row in range(rows):
            elements(matrix, row * stride + column, 1, operand)[0] = 0.0


@compiled
def interleave_rows(matrix, rows, stride, columns, cell_rows, cell_stride, operand):
    """Interleave pairs of rows of a matrix (rows, columns) into rows of cells, for a sum over rows. If the number of
    rows is odd, the last row is paired with zeros."""
    for row in range(0, rows, 2):
        first = elements(matrix, row * stride, columns, operand)
        pairs = elements(cell_rows, row * cell_stride, 2 * columns, operand)
        if row + 1 < rows:
            second = elements(matrix, (row + 1) * stride, columns, operand)
            for j in range(columns):
                pairs[2 * j] = first[j]
                pairs[2 * j + 1] = second[j]
        else:
            for j in range(columns):
                pairs[2 * j] = first[j]
                pairs[2 * j + 1] = 0.0


@compiled
def prefetch_row(matrix, row, columns):
    """Prefetch the row `_PREFETCH_DISTANCE` rows after this row, if rows are short."""
    size = itemsize(matrix.element)
    if columns * size > _SHORT_ROW_BYTES:
        return
    start = matrix.data + (row + _PREFETCH_DISTANCE) * matrix.row_stride * size
    for at in range(start, start + columns * size, CACHE_LINE_BYTES):
        prefetch(at)
    prefetch(start + columns * size - 1)
