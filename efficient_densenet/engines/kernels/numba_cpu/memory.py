"""Arrays, rows and scratch as kernels address them.

A kernel gets addresses as integers, and `zero`, the 0 of the dtype of its arithmetic, from which Numba infers all
types: tiles, packed panels and vectors are of it. The matrices that a kernel is given may be narrower. Each has an
`element`, which is nothing but its dtype. Strides and offsets count elements where nothing else is said.
"""

from numba import carray

from .intrinsics import compiled, pointer, prefetch

CACHE_LINE_BYTES = 64

PANEL_BYTES = 64
"""The width NR of a packed panel: a few vectors of any processor's."""

_PREFETCH_DISTANCE = 24
"""In rows. A short row of a wider matrix is prefetched by software, since hardware does not foresee the next one."""

_SHORT_ROW_BYTES = 1024


def padded_stride(count: int, itemsize: int) -> int:
    """A row stride for so many elements: an odd number of cache lines, since rows that lie a power of two apart would
    compete for the same sets of a cache."""
    return (-(-count * itemsize // CACHE_LINE_BYTES) | 1) * CACHE_LINE_BYTES // itemsize


def whole_panels(columns: int, itemsize: int) -> int:
    """The number of columns, rounded up to whole panels."""
    panel = PANEL_BYTES // itemsize
    return -(-columns // panel) * panel


_padded_stride, _whole_panels = compiled(padded_stride), compiled(whole_panels)


@compiled
def elements(address, index, count, zero):
    """An array of `count` elements, the first of which is element `index` after the address."""
    return carray(pointer(address, index, zero), (count,))


@compiled
def row_of(matrix, row, left, count):
    """So many elements of a row of a matrix, from column `left` on."""
    return elements(matrix.data, row * matrix.row_stride + left, count, matrix.element)


@compiled
def is_narrow(element, zero):
    """Whether what is stored has to be rounded first. LLVM knows the answer."""
    return itemsize(element) < itemsize(zero)


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
        numbers[i] = 0


@compiled
def copy(source, destination, count, zero):
    """Forwards, so that the two may overlap where the destination comes first."""
    source, destination = elements(source, 0, count, zero), elements(destination, 0, count, zero)
    for i in range(count):
        destination[i] = source[i]


@compiled
def convert(source, source_element, destination, destination_element, count):
    """The same from one dtype to another. They do not overlap."""
    source = elements(source, 0, count, source_element)
    destination = elements(destination, 0, count, destination_element)
    for i in range(count):
        destination[i] = source[i]


@compiled
def prefetch_row(matrix, row, columns):
    """Prefetch the row that lies `_PREFETCH_DISTANCE` rows after this one, if rows are short."""
    size = itemsize(matrix.element)
    if columns * size > _SHORT_ROW_BYTES:
        return
    start = matrix.data + (row + _PREFETCH_DISTANCE) * matrix.row_stride * size
    for at in range(start, start + columns * size, CACHE_LINE_BYTES):
        prefetch(at)
    prefetch(start + columns * size - 1)
