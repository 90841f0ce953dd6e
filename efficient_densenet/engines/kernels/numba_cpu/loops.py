"""The programs of `compiled`, made by Numba: each is one thread's part of one operation.

A program is called with the address of a job, which tells it all else. It takes one tile of rows after another through
everything that is to be done with them, while what it makes of them lies in the processor's nearest caches. What a row,
a map and a gradient are stands in `portable`. Matrices are given by address. Products are made here, since a
tile's are so small that what a BLAS does before each takes a good part of its time. All is in one file, since Numba
makes a program that it keeps on disk anew when the program's own file has changed, and no other.
"""

import functools
import itertools
import math
import struct
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FIELDS = [
    *("thread_number", "num_threads", "wait"),
    *("size", "rows", "tile", "scratch", "room"),
    *("channels", "values", "values_line", "scale", "shift"),
    *("share", "pending", "pending_line", "first"),
    *("weight", "panels", "wide", "width", "kernel", "out", "out_line"),
    *("parts", "found", "weight_parts", "weight_parts_line", "of_weight"),
    *("made", "made_line", "slope", "constant", "made_share", "made_pending", "made_pending_line"),
    *("ahead_channels", "ahead_values", "ahead_values_line", "ahead_scale", "ahead_shift"),
    *("ahead_weight", "ahead_panels", "ahead_out"),
    *("grad", "deep", "tall", "depth", "height", "breadth", "reach", "beyond", "pools"),
]
"""What a job may tell: addresses, and numbers of things. A line is how far apart in memory two rows are, `size` how
many bytes a number has, `room` how many numbers a thread's scratch holds, `width` how many channels are made, `kernel`
by how many pixels each, `wide` how many columns the weight's panels have, `beyond` how many rows a kernel's farthest
pixel is away, `pools` of how many pixels a mean is read. `parts` (statistics, or the two sums, in double precision) and
`weight_parts` are for what each thread adds up, `found` and `of_weight` for what it comes to; as far apart as rows of
`weight_parts` are those of a tile's gradient of what was made. What is not told is 0, and not done."""

PANEL_BYTES = 64
"""So much of a row of a matrix lies together for a product: a few vectors of any processor's."""

_MANY_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))

_BLOCKS = {1: 12, 2: 12, 3: 8} if _MANY_REGISTERS else {1: 6}
"""So many rows of a product are made at once, of so many panels: as many as there are registers for the sums. The more
panels there are, the fewer numbers are read for as many products."""

ROWS = math.lcm(*_BLOCKS.values())
"""A tile has room for whole blocks of any kind."""

_COLUMNS = 256
"""So many sums are held in registers, or next to them, at once."""

_DEPTH = 256
"""So many numbers of a sum are added up at once: a panel of as many rows stays in the nearest cache."""

_HEIGHT = 96
"""So many rows are made of one panel after another, while what they are of stays in a cache: a multiple of all in
`_BLOCKS`."""

_AHEAD = 24
"""So many rows before it is read a short part of a row is asked for, which processors do not foresee."""

_SHORT = 1024
"""So many bytes are."""

_LINE_BYTES = 64
"""What a cache fetches at once."""

_SQUARE = 64
"""So many channels of a weight are turned at once, while what they are of stays in a cache."""

_RUN = 32
"""So many rows are added up before they join a sum, in double precision, which a long sum would need."""

PART_ROWS = 5
"""What a thread finds of statistics: how many rows it saw, their means, their squared distances, and room for two."""

LINES = {name: f"{name}_line" for name in FIELDS if f"{name}_line" in FIELDS}

WRITTEN = {
    "pending",
    "out",
    "parts",
    "found",
    "weight_parts",
    "of_weight",
    "panels",
    "ahead_panels",
    "ahead_out",
    "scratch",
}

JOB = struct.Struct(f"{len(FIELDS)}q8x")
"""A job in memory; at its end is a zero of the kind of numbers that it is on, which tells a program of what kind."""


@intrinsic
def _number(typingctx, address):
    """What the function at the address, which takes nothing, gives: nonsense, where it gives nothing."""

    def codegen(context, builder, signature, args):
        function = builder.inttoptr(args[0], ir.FunctionType(ir.IntType(32), []).as_pointer())
        return builder.sext(builder.call(function, []), ir.IntType(64))

    return types.intp(types.intp), codegen


@intrinsic
def _pointer(typingctx, address, index, like):
    """To the number that lies `index` numbers after the address."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], context.get_value_type(signature.args[2]).as_pointer())
        return builder.gep(pointer, [args[1]])

    return types.CPointer(like)(types.intp, types.intp, like), codegen


def _room(builder, kind, count):
    """Room for so many, where `cgutils.alloca_once` would also fill it with zeros, one by one."""
    with builder.goto_entry_block():
        return builder.alloca(ir.ArrayType(kind, count))


@intrinsic
def _held(typingctx, like):
    """A pointer to `_COLUMNS` numbers of which a compiler knows that no other pointer leads there."""

    def codegen(context, builder, signature, args):
        real = context.get_value_type(signature.args[0])
        return builder.bitcast(_room(builder, real, _COLUMNS), real.as_pointer())

    return types.CPointer(like)(like), codegen


def _block(panels):
    """What makes some rows of the product of a and so many panels of b: c = a @ b, or c += a @ b.

    All sums are held in registers. Addresses, and steps in bytes: from one row of a to the next, from one number of a
    sum to the next, and from one row to the next of b and of c; `panel` is that from one panel to the next.
    """
    rows = _BLOCKS[panels]

    @intrinsic
    def made(typingctx, a, down, along, count, b, line_b, panel, add, c, line_c, like):
        def codegen(context, builder, signature, args):
            a, down, along, count, b, line_b, panel, add, c, line_c, _ = args
            real = context.get_value_type(signature.args[-1])
            size = context.get_abi_sizeof(real)
            vector = ir.VectorType(real, PANEL_BYTES // size)
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
            multiply_add = f"llvm.fmuladd.v{vector.count}f{8 * size}"
            multiply_add = builder.module.declare_intrinsic(multiply_add, fnty=ir.FunctionType(vector, [vector] * 3))

            def at(address, kind):
                return builder.inttoptr(address, kind.as_pointer())

            def beyond(address, step, i):
                return builder.add(address, builder.mul(step, ir.Constant(step.type, i)))

            def opaque(place):
                """The same, but a compiler does not see from where, and so does not go from row to row by adding up."""
                return builder.asm(ir.FunctionType(place.type, [place.type]), "", "=r,0", [place], False)

            def repeated(number):
                first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
                return builder.shuffle_vector(first, first, everywhere)

            sums = {
                (i, j): cgutils.alloca_once_value(builder, ir.Constant(vector, None))
                for i, j in itertools.product(range(rows), range(panels))
            }
            steps = {(i, j): ir.Constant(c.type, j * PANEL_BYTES) for i, j in sums}
            places = {(i, j): at(builder.add(beyond(c, line_c, i), step), vector) for (i, j), step in steps.items()}
            of_a, of_b = (cgutils.alloca_once_value(builder, first) for first in (a, b))
            with cgutils.for_range(builder, count):
                factors, read = opaque(builder.load(of_a)), builder.load(of_b)
                parts = [builder.load(at(beyond(read, panel, j), vector), align=size) for j in range(panels)]
                for i in range(rows):
                    factor = repeated(builder.load(at(beyond(factors, down, i), real)))
                    for j, part in enumerate(parts):
                        total = builder.call(multiply_add, [factor, part, builder.load(sums[i, j])])
                        builder.store(total, sums[i, j])
                for place, step in ((of_a, along), (of_b, line_b)):
                    builder.store(builder.add(builder.load(place), step), place)
            with builder.if_then(add):
                for each, total in sums.items():
                    before = builder.load(places[each], align=size)
                    builder.store(builder.fadd(builder.load(total), before), total)
            for each, total in sums.items():
                builder.store(builder.load(total), places[each], align=size)
            return context.get_dummy_value()

        address = types.intp
        return types.void(*[address] * 7, types.boolean, address, address, like), codegen

    return made


@intrinsic
def _spare(typingctx, like):
    """The address of a block that a product may be made in."""

    def codegen(context, builder, signature, args):
        most = max(rows * panels for panels, rows in _BLOCKS.items())
        return builder.ptrtoint(_room(builder, ir.IntType(8), most * PANEL_BYTES), ir.IntType(64))

    return types.intp(like), codegen


@intrinsic
def _fetch(typingctx, address):
    """Ask for what lies at the address, if anything does."""

    def codegen(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], byte), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


_HOW = {"error_model": "numpy", "fastmath": {"contract"}}
_compiled = njit(**_HOW, no_cpython_wrapper=True, no_cfunc_wrapper=True)
_inlined = njit(**_HOW, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


def apart(count, size):
    """So many numbers, or some more: rows that lie powers of two apart would share a place in a cache."""
    return (-(-count * size // _LINE_BYTES) | 1) * _LINE_BYTES // size


_apart = _compiled(apart)


@_compiled
def _at(address, index, count, like):
    """So many numbers, from the one on that lies `index` numbers after the address."""
    return carray(_pointer(address, index, like), (count,))


@_compiled
def _expect(values, line, row, count, size):
    """Ask for a row that comes after this one."""
    if count * size > _SHORT:
        return
    start = values + (row + _AHEAD) * line * size
    for at in range(start, start + count * size, _LINE_BYTES):
        _fetch(at)
    _fetch(start + count * size - 1)


def _strip(panels):
    """What makes some rows of so many panels' part of a product, block by block. Steps are in bytes."""
    if panels not in _BLOCKS:
        return None
    rows, block = _BLOCKS[panels], _block(panels)

    @_compiled
    def made(height, columns, count, a, down, along, b, line_b, panel, adds, c, line_c, zero):
        width, spare = PANEL_BYTES // _at(0, 0, 1, zero).itemsize, _spare(zero)
        for top in range(0, height, rows):
            some, out = min(rows, height - top), c + top * line_c
            inside = some == rows and columns == panels * width
            where = (adds, out, line_c) if inside else (False, spare, panels * PANEL_BYTES)
            block(a + top * down, down, along, count, b, line_b, panel, *where, zero)
            if not inside:
                for i in range(some):
                    to = _at(out + i * line_c, 0, columns, zero)
                    found = _at(spare, i * panels * width, columns, zero)
                    for j in range(columns):
                        to[j] = found[j] + (to[j] if adds else zero)

    return made


_one, _two, _three = (_strip(panels) for panels in (1, 2, 3))


@_compiled
def _product(height, breadth, count, a, down, along, b, line_b, add, c, line_c, zero):
    """c = a @ b, or c += a @ b: so many rows and columns, each number the sum of so many.

    Steps are in numbers; that between two rows of b is 0 where b lies panel by panel. b is read by whole panels and a
    by whole `ROWS`, so that both must lie in memory that goes on after them, whatever is there; c is written to its
    size.
    """
    size = _at(0, 0, 1, zero).itemsize
    width = PANEL_BYTES // size
    line_b, panel = (line_b * size, PANEL_BYTES) if line_b else (PANEL_BYTES, count * PANEL_BYTES)
    down, along, line_c = down * size, along * size, line_c * size
    for start in range(0, count, _DEPTH):
        depth, adds = min(_DEPTH, count - start), add or start > 0
        for first in range(0, height, _HEIGHT):
            rows, left = min(_HEIGHT, height - first), 0
            while left < breadth:
                panels = -(-(breadth - left) // width)
                of_a, of_b = a + first * down + start * along, b + start * line_b + left // width * panel
                out = c + first * line_c + left * size
                if _MANY_REGISTERS and panels > 2 and panels != 4:
                    columns = min(3 * width, breadth - left)
                    _three(rows, columns, depth, of_a, down, along, of_b, line_b, panel, adds, out, line_c, zero)
                elif _MANY_REGISTERS and panels > 1:
                    columns = min(2 * width, breadth - left)
                    _two(rows, columns, depth, of_a, down, along, of_b, line_b, panel, adds, out, line_c, zero)
                else:
                    columns = min(width, breadth - left)
                    _one(rows, columns, depth, of_a, down, along, of_b, line_b, panel, adds, out, line_c, zero)
                left += columns


@_compiled
def _part(count, thread, job):
    """Which of so many things are the thread's."""
    threads = _number(job.num_threads)
    return count * thread // threads, count * (thread + 1) // threads


@_compiled
def _begin(job):
    """The thread, and which rows are its."""
    thread = _number(job.thread_number)
    return thread, *_part(job.rows, thread, job)


@_compiled
def _wait(job):
    """For all threads to come here: what each has written the others may read."""
    _number(job.wait)


@_compiled
def _clear(address, count, zero):
    numbers = _at(address, 0, count, zero)
    for i in range(count):
        numbers[i] = 0


@_compiled
def _scratch(job, thread):
    return job.scratch + thread * job.room * job.size


@_compiled
def _activate(values, line, start, stop, channels, scale, shift, out, zero):
    size = _at(0, 0, 1, zero).itemsize
    to_line = _apart(channels, size)
    scale, shift = _at(scale, 0, channels, zero), _at(shift, 0, channels, zero)
    for row in range(start, stop):
        value, found = _at(values, row * line, channels, zero), _at(out, (row - start) * to_line, channels, zero)
        _expect(values, line, row, channels, size)
        for j in range(channels):
            x = value[j] * scale[j] + shift[j]
            found[j] = x if not x <= zero else zero  # what is not a number stays so


@_compiled
def _settle(job, start, stop, out, line):
    width, zero = job.width, job.zero
    slope, constant = _at(job.slope, 0, width, zero), _at(job.constant, 0, width, zero)
    share = _at(job.made_share, 0, width, zero)
    for row in range(start, stop):
        value = _at(job.made, row * job.made_line, width, zero)
        pending = _at(job.made_pending, row * job.made_pending_line, width, zero)
        found = _at(out, (row - start) * line, width, zero)
        _expect(job.made, job.made_line, row, width, job.size)
        _expect(job.made_pending, job.made_pending_line, row, width, job.size)
        for j in range(width):
            found[j] = value[j] * slope[j] + constant[j] + pending[j] * share[j]


@_compiled
def _collect(job, thread, start, stop, gradient, line):
    """Mask a gradient, add it to what is pending, and add up the two sums. A pooled one is that of several pixels."""
    channels, zero = job.channels, job.zero
    deep, tall, wide = (job.deep + 1, job.tall + 1, 2) if job.pools else (1, 1, 1)
    run = _RUN // (deep * tall * wide)
    ones, products = carray(_held(zero), (_COLUMNS,)), carray(_held(zero), (_COLUMNS,))
    for left in range(0, channels, _COLUMNS):
        width = min(_COLUMNS, channels - left)
        sum_of_ones = _at(job.parts, thread * 2 * channels + left, width, 1.0)
        sum_of_products = _at(job.parts, (thread * 2 + 1) * channels + left, width, 1.0)
        for begin in range(start, stop, run):
            for j in range(width):
                ones[j] = products[j] = 0
            for row in range(begin, min(begin + run, stop)):
                given = _at(gradient, (row - start) * line + left, width, zero)
                if not job.pools:
                    _expect(job.pending, job.pending_line, row, channels, job.size)
                first = _corner(row, job) if job.pools else row
                for i in range(deep):
                    for k in range(tall):
                        for pixel in range(first, first + wide):
                            _collect_row(job, pixel + (i * job.height + k) * job.breadth, left, given, ones, products)
            for j in range(width):
                sum_of_ones[j] += ones[j]
                sum_of_products[j] += products[j]


@_inlined
def _collect_row(job, row, left, given, ones, products):
    width, first, zero = len(given), job.first, job.zero
    value = _at(job.values, row * job.values_line + left, width, zero)
    pending = _at(job.pending, row * job.pending_line + left, width, zero)
    scale, shift = _at(job.scale, left, width, zero), _at(job.shift, left, width, zero)
    share = _at(job.share, left, width, zero)
    for j in range(width):
        grad = given[j] if not value[j] * scale[j] + shift[j] <= zero else zero
        ones[j] += grad
        products[j] += grad * value[j]
        pending[j] = grad * share[j] + (zero if first else pending[j])


@_compiled
def _corner(row, job):
    """The first of the pixels of which a pooled one is the mean."""
    breadth, height = job.breadth // 2, job.height // 2 if job.tall else job.height
    depth = job.depth // 2 if job.deep else job.depth
    line, layer = row // breadth, row // (breadth * height)
    top = (layer // depth * job.depth + layer % depth * 2) * job.height + line % height * 2
    return top * job.breadth + row % breadth * 2


@_compiled
def _pool(job, start, stop, out):
    """The means of what is read, of every pixel and its neighbours."""
    channels, zero = job.channels, job.zero
    scale, shift = _at(job.scale, 0, channels, zero), _at(job.shift, 0, channels, zero)
    part, line = (zero + 1) / job.pools, _apart(channels, job.size)
    for row in range(start, stop):
        first, found = _corner(row, job), _at(out, (row - start) * line, channels, zero)
        for j in range(channels):
            found[j] = 0
        for i in range(job.deep + 1):
            for k in range(job.tall + 1):
                for pixel in range(2):
                    pixel += first + (i * job.height + k) * job.breadth
                    value = _at(job.values, pixel * job.values_line, channels, zero)
                    for j in range(channels):
                        x = value[j] * scale[j] + shift[j]
                        found[j] += x * part if not x <= zero else zero


@_compiled
def _measure(job, thread, start, stop):
    """Have these rows of what is made join the statistics of those that the thread has seen."""
    width, zero = job.width, job.zero
    parts = job.parts + thread * PART_ROWS * width * 8
    seen, means = _at(parts, 0, width, 1.0), _at(parts, width, width, 1.0)
    squares = _at(parts, 2 * width, width, 1.0)
    own_means, own_squares = _at(parts, 3 * width, width, 1.0), _at(parts, 4 * width, width, 1.0)
    before, count = seen[0], stop - start
    for j in range(width):
        seen[j] = before + count
        own_means[j] = own_squares[j] = 0
    for row in range(start, stop):
        value = _at(job.out, row * job.out_line, width, zero)
        for j in range(width):
            own_means[j] += value[j]
    for j in range(width):
        own_means[j] /= count
    for row in range(start, stop):
        value = _at(job.out, row * job.out_line, width, zero)
        for j in range(width):
            own_squares[j] += (value[j] - own_means[j]) ** 2
    for j in range(width):
        apart = own_means[j] - means[j]
        means[j] += apart * count / (before + count)
        squares[j] += own_squares[j] + apart * apart * before * count / (before + count)


@_compiled
def _pixel(row, job):
    """Where in its picture a row lies."""
    line = row // job.breadth
    return row % job.breadth, line % job.height, line // job.height % job.depth


@_compiled
def _next(x, y, z, job):
    """The pixel after this one."""
    if x + 1 < job.breadth:
        return x + 1, y, z
    if y + 1 < job.height:
        return 0, y + 1, z
    return 0, 0, z + 1 if z + 1 < job.depth else 0


@_compiled
def _gather(job, start, stop, out, line):
    """What a kernel sees around every pixel of the gradient, and nothing outside the picture."""
    width, reach, breadth, zero = job.width, job.reach, job.breadth, job.zero
    height, depth, deep, tall, grad = job.height, job.depth, job.deep, job.tall, job.grad
    x, y, z = _pixel(start, job)
    for row in range(start, stop):
        at = (row - start) * line
        left, right = 0 if x >= reach else 1, 3 if x + reach < breadth else 2
        for i in range(-deep, deep + 1):
            for j in range(-tall, tall + 1):
                found = _at(out, at, 3 * width, zero)
                inside = 0 <= z + i * reach < depth and 0 <= y + j * reach < height
                if not inside or left or right < 3:
                    for o in range(3 * width):
                        found[o] = 0
                if inside:
                    first = row + (i * height + j) * breadth * reach
                    together = right - left if reach == 1 else 1
                    for k in range(left, right, together):
                        seen = _at(grad, (first + (k - 1) * reach) * width, together * width, zero)
                        found = _at(out, at + k * width, together * width, zero)
                        for o in range(together * width):
                            found[o] = seen[o]
                at += 3 * width
        _clear(out + at * job.size, job.weight_parts_line - job.kernel * width, zero)
        x, y, z = _next(x, y, z, job)


@_compiled
def _add_up(job, start, stop, made, origin):
    """What every pixel gets from those around it; `made` begins with what row `origin` gives."""
    width, reach, breadth, zero = job.width, job.reach, job.breadth, job.zero
    height, depth, deep, tall, wide = job.height, job.depth, job.deep, job.tall, job.wide
    x, y, z = _pixel(start, job)
    for row in range(start, stop):
        _clear(job.out + row * job.out_line * job.size, width, zero)
        found, at = _at(job.out, row * job.out_line, width, zero), 0
        for i in range(-deep, deep + 1):
            for j in range(-tall, tall + 1):
                if 0 <= z + i * reach < depth and 0 <= y + j * reach < height:
                    line = (row - origin + (i * height + j) * breadth * reach) * wide + at
                    if reach <= x < breadth - reach:
                        left = _at(made, line - reach * wide, width, zero)
                        middle = _at(made, line + width, width, zero)
                        right = _at(made, line + 2 * width + reach * wide, width, zero)
                        for o in range(width):
                            found[o] += left[o] + middle[o] + right[o]
                    else:
                        for k in range(3):
                            if 0 <= x + (k - 1) * reach < breadth:
                                one = _at(made, line + k * width + (k - 1) * reach * wide, width, zero)
                                for o in range(width):
                                    found[o] += one[o]
                at += 3 * width
        x, y, z = _next(x, y, z, job)


@_compiled
def _copy(found, to, count, zero):
    found, to = _at(found, 0, count, zero), _at(to, 0, count, zero)
    for j in range(count):
        to[j] = found[j]


@_compiled
def _pull_back(job, thread, start, stop, grad, line, activation):
    """From the gradient of what was made to that of what was read and, where a weight learns, to that of it."""
    channels, rows, wide, zero = job.channels, stop - start, job.wide, job.zero
    gradient, gradient_line = grad, line
    if job.weight:
        gradient, gradient_line = activation, _apart(wide, job.size)  # in its place: a tile needs less of a cache
        if job.of_weight:
            activation_line, parts_line = _apart(channels, job.size), job.weight_parts_line
            parts = job.weight_parts + thread * channels * parts_line * job.size
            if job.pools:
                _pool(job, start, stop, activation)
            else:
                _activate(job.values, job.values_line, start, stop, channels, job.scale, job.shift, activation, zero)
            _product(
                *(channels, parts_line, rows),
                *(activation, 1, activation_line, grad, line, True, parts, parts_line, zero),
            )
        _product(
            *(rows, wide, job.kernel * job.width),
            *(grad, line, 1, job.panels, 0, False, gradient, gradient_line, zero),
        )
    _collect(job, thread, start, stop, gradient, gradient_line)


@_compiled
def _pack(job, thread, weight, panels, channels, back):
    """Lay a weight out as products read it: by panels of so many columns, the last of which is filled up with zeros.

    A row for each channel read and a column for each that is made, pixel by pixel of a kernel; `back` a row for each
    that is made and a column for each read, the pixels in reverse, since gradients come from where it gave to.
    """
    width, kernel, zero = job.width, job.kernel, job.zero
    panel = PANEL_BYTES // _at(0, 0, 1, zero).itemsize
    rows, columns = (kernel * width, channels) if back else (channels, kernel * width)
    first, last = _part(channels, thread, job)
    given = _at(weight, 0, width * channels * kernel, zero)
    found = _at(panels, 0, rows * -(-columns // panel) * panel, zero)
    for start in range(first, last, _SQUARE):
        stop = min(start + _SQUARE, last)
        for k in range(kernel):
            for o in range(width):
                at, row, column = o * channels * kernel + k, (kernel - 1 - k) * width + o, k * width + o
                to = column // panel * rows * panel + column % panel
                if back:
                    for c in range(start, stop):
                        found[(c // panel * rows + row) * panel + c % panel] = given[at + c * kernel]
                else:
                    for c in range(start, stop):
                        found[to + c * panel] = given[at + c * kernel]
    if thread == 0 and columns % panel:
        for row in range(rows):
            for column in range(columns % panel, panel):
                found[(columns // panel * rows + row) * panel + column] = 0


@_compiled
def _ready(job, thread):
    """Before anything is made: the weight, if any, is packed, and nothing is measured yet."""
    if job.weight:
        _pack(job, thread, job.weight, job.panels, job.channels, False)
    if job.parts:
        count = PART_ROWS * job.width
        _clear(job.parts + thread * count * 8, count, 1.0)
    _wait(job)


@_compiled
def _join_statistics(job, thread):
    """The mean and the variance of all rows, from what each thread saw, if they are measured."""
    if not job.parts:
        return
    _wait(job)
    width, threads, zero = job.width, _number(job.num_threads), job.zero
    means, variances = _at(job.found, 0, width, zero), _at(job.found, width, width, zero)
    parts = _at(job.parts, 0, threads * PART_ROWS * width, 1.0)
    first, last = _part(width, thread, job)
    for j in range(first, last):
        mean = squares = 0.0
        for i in range(threads):
            at = i * PART_ROWS * width + j
            mean += parts[at + width] * parts[at]
        mean /= job.rows
        for i in range(threads):
            at = i * PART_ROWS * width + j
            squares += parts[at + 2 * width] + (parts[at + width] - mean) ** 2 * parts[at]
        means[j], variances[j] = mean, squares / job.rows


@_compiled
def _join_sums(job, thread):
    """The two sums over all rows."""
    count, threads, zero = 2 * job.channels, _number(job.num_threads), job.zero
    found, parts = _at(job.found, 0, count, zero), _at(job.parts, 0, threads * count, 1.0)
    first, last = _part(count, thread, job)
    for j in range(first, last):
        total = 0.0
        for i in range(threads):
            total += parts[i * count + j]
        found[j] = total


@_compiled
def _join_weight(job, thread):
    """The gradient of the weight, as the weight lies: the threads' lie transposed, tall rather than wide, which
    processors make faster."""
    channels, width, kernel, line, zero = job.channels, job.width, job.kernel, job.weight_parts_line, job.zero
    found, threads = _at(job.of_weight, 0, width * channels * kernel, zero), _number(job.num_threads)
    first, last = _part(channels, thread, job)
    for start in range(first, last, _SQUARE):
        count = min(_SQUARE, last - start)
        total = _at(job.weight_parts, start * line, count * line, zero)
        for i in range(1, threads):
            part = _at(job.weight_parts, (i * channels + start) * line, count * line, zero)
            for j in range(count * line):
                total[j] += part[j]
        for o in range(width):
            for k in range(kernel):
                to = (o * channels + start + 1) * kernel - 1 - k
                for c in range(count):
                    # In a kernel, what is not finite meets the padding's zeros.
                    outside = total[c * line + kernel // 2 * width + o] * zero if kernel > 1 else zero
                    found[to + c * kernel] = total[c * line + k * width + o] + outside


def settle(job):
    job = carray(job, 1)[0]
    _, first, last = _begin(job)
    _settle(job, first, last, job.out + first * job.out_line * job.size, job.out_line)


def squeeze(job):
    """Make and, where there are `parts`, measure. Without a weight nothing is made, and `out` is only read."""
    job = carray(job, 1)[0]
    thread, first, last = _begin(job)
    channels, width, line, zero = job.channels, job.width, job.out_line, job.zero
    activation = _scratch(job, thread)
    _ready(job, thread)
    for start in range(first, last, job.tile):
        stop = min(start + job.tile, last)
        if job.pools:
            _pool(job, start, stop, activation)
        elif job.weight:
            _activate(job.values, job.values_line, start, stop, channels, job.scale, job.shift, activation, zero)
        if job.weight:
            out = job.out + start * line * job.size
            _product(
                *(stop - start, width, channels),
                *(activation, _apart(channels, job.size), 1, job.panels, 0, False, out, line, zero),
            )
        if job.parts:
            _measure(job, thread, start, stop)
    _join_statistics(job, thread)


def gradients(job):
    job = carray(job, 1)[0]
    thread, first, last = _begin(job)
    width, tile, line, zero = job.width, job.tile, _apart(job.weight_parts_line, job.size), job.zero
    of_made = _scratch(job, thread)
    activation = of_made + tile * line * job.size
    if job.weight:
        _pack(job, thread, job.weight, job.panels, job.channels, True)
    if job.ahead_channels:
        _pack(job, thread, job.ahead_weight, job.ahead_panels, job.ahead_channels, False)
    if job.of_weight:
        count = job.channels * job.weight_parts_line
        _clear(job.weight_parts + thread * count * job.size, count, zero)
    _clear(job.parts + thread * 2 * job.channels * 8, 2 * job.channels, 1.0)
    _wait(job)
    for start in range(first, last, tile):
        stop = min(start + tile, last)
        if job.kernel > 1:
            _gather(job, start, stop, of_made, line)
        elif job.grad:
            for row in range(start, stop):
                _copy(job.grad + row * width * job.size, of_made + (row - start) * line * job.size, width, zero)
        else:
            _settle(job, start, stop, of_made, line)
        _pull_back(job, thread, start, stop, of_made, line, activation)
        if job.ahead_channels:  # while the tile is in cache
            fewer, out = job.ahead_channels, job.ahead_out + start * width * job.size
            scale, shift = job.ahead_scale, job.ahead_shift
            _activate(job.ahead_values, job.ahead_values_line, start, stop, fewer, scale, shift, activation, zero)
            _product(
                *(stop - start, width, fewer),
                *(activation, _apart(fewer, job.size), 1, job.ahead_panels, 0, False, out, width, zero),
            )
    _wait(job)
    _join_sums(job, thread)
    if job.of_weight:
        _join_weight(job, thread)


def convolve(job):
    """What every pixel gives to those beyond it is made some rows further than what they get is added up."""
    job = carray(job, 1)[0]
    thread, first, last = _begin(job)
    channels, wide, tile, zero, beyond = job.channels, job.wide, job.tile, job.zero, job.beyond
    line = _apart(channels, job.size)
    activation = _scratch(job, thread)
    made = activation + tile * line * job.size
    origin = done = max(0, first - beyond)
    _ready(job, thread)
    for start in range(first, last, tile):
        stop = min(start + tile, last)
        if start - beyond > origin:  # what no later row gets anything from makes room
            kept = made + (start - beyond - origin) * wide * job.size
            _copy(kept, made, (done - start + beyond) * wide, zero)
            origin = start - beyond
        wanted = min(job.rows, stop + beyond)
        while done < wanted:
            some, out = min(tile, wanted - done), made + (done - origin) * wide * job.size
            _activate(job.values, job.values_line, done, done + some, channels, job.scale, job.shift, activation, zero)
            _product(
                *(some, wide, channels),
                *(activation, line, 1, job.panels, 0, False, out, wide, zero),
            )
            done += some
        _add_up(job, start, stop, made, origin)
        if job.parts:
            _measure(job, thread, start, stop)
    _join_statistics(job, thread)


@functools.cache
def made(program: Callable[[np.record], None], dtype: torch.dtype) -> Any:
    """A program for such numbers. Numba makes it at its first use and, where it may write, finds it on disk later."""
    zero = "zero", np.dtype(str(dtype).removeprefix("torch."))
    job = from_dtype(np.dtype([*((field, np.int64) for field in FIELDS), zero]))
    signature = types.void(types.CPointer(job))
    try:
        return cfunc(signature, cache=True, **_HOW)(program)
    except (RuntimeError, OSError):  # there is nowhere to keep it
        return cfunc(signature, **_HOW)(program)


def check() -> None:
    """Fails where Numba cannot make a program: the one that needs most."""
    made(gradients, torch.float32)
