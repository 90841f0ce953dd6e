"""The GEMM's micro-kernel: an MR × NR block of C = A @ B or C += A @ B, whose sums stay in registers.

NR is one, two or three panels of `PANEL_BYTES`; MR is the number of rows for whose sums there are vector registers.
With more panels, the same number of multiplications needs fewer loads. A and B consist of cells, which are as wide as
an element of C: a number, or a pair of bfloat16s that are adjacent in the sum (the VNNI layout).
"""

import itertools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..compiler.bfloat16 import BFLOAT
from .memory import PANEL_BYTES


def register_blocks(avx512: bool) -> dict[int, int]:
    """MR for each number of panels: AVX-512 has 32 vector registers of 64 bytes, AVX2 has 16 of 32."""
    return {1: 12, 2: 12, 3: 8} if avx512 else {1: 6}


class _Vectors:
    """LLVM's instructions on vectors of the width of a panel."""

    def __init__(self, builder: ir.IRBuilder, element: ir.Type, itemsize: int):
        self.builder, self.element, self.itemsize = builder, element, itemsize
        self.type = ir.VectorType(element, PANEL_BYTES // itemsize)
        self._every_lane = ir.Constant(ir.VectorType(ir.IntType(32), self.type.count), None)

    def zero(self) -> ir.Constant:
        return ir.Constant(self.type, None)

    def at(self, address: ir.Value) -> ir.Value:
        return self.builder.inttoptr(address, self.type.as_pointer())

    def load(self, address: ir.Value) -> ir.Value:
        return self.builder.load(self.at(address), align=self.itemsize)

    def broadcast(self, address: ir.Value) -> ir.Value:
        number = self.builder.load(self.builder.inttoptr(address, self.element.as_pointer()))
        first = self.builder.insert_element(ir.Constant(self.type, ir.Undefined), number, ir.IntType(32)(0))
        return self.builder.shuffle_vector(first, first, self._every_lane)

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        name = f"llvm.fmuladd.v{self.type.count}f{8 * self.itemsize}"
        fmuladd = self.builder.module.declare_intrinsic(name, fnty=ir.FunctionType(self.type, [self.type] * 3))
        return self.builder.call(fmuladd, [a, b, c])

    def multiply_add_pairs(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """c plus the products of both bfloat16s in each cell: AVX512-BF16's `vdpbf16ps`."""
        name, pairs = "llvm.x86.avx512bf16.dpbf16ps.512", ir.VectorType(BFLOAT, 2 * self.type.count)
        function = ir.FunctionType(self.type, [self.type, pairs, pairs])
        operands = (self.builder.bitcast(each, pairs) for each in (a, b))
        return self.builder.call(self.builder.module.declare_intrinsic(name, fnty=function), [c, *operands])


def _stepped(builder: ir.IRBuilder, address: ir.Value, step: ir.Value, count: int) -> ir.Value:
    return builder.add(address, builder.mul(step, ir.Constant(step.type, count)))


def _opaque(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The same address, hidden from LLVM's optimizer, which would otherwise keep a pointer for each of the MR rows."""
    return builder.asm(ir.FunctionType(address.type, [address.type]), "", "=r,0", [address], False)


def register_block(rows: int, panels: int, pairs: bool = False):
    """An intrinsic: C (MR, NR) = A (MR, k) @ B (k, NR), or += with `accumulate`. With `pairs` a cell is two bfloat16s.

    Addresses are of the first elements; strides are in bytes. `b_panel` is the stride between B's panels.
    """

    @intrinsic
    def block(typingctx, a, a_row, a_column, k, b, b_row, b_panel, accumulate, c, c_row, zero):
        def codegen(context, builder, signature, args):
            a, a_row, a_column, k, b, b_row, b_panel, accumulate, c, c_row, _ = args
            element = context.get_value_type(signature.args[-1])
            vectors = _Vectors(builder, element, context.get_abi_sizeof(element))
            multiply_add = vectors.multiply_add_pairs if pairs else vectors.multiply_add
            cells = list(itertools.product(range(rows), range(panels)))
            sums = {cell: cgutils.alloca_once_value(builder, vectors.zero()) for cell in cells}
            columns = {(i, j): ir.Constant(c.type, j * PANEL_BYTES) for i, j in cells}
            outputs = {
                (i, j): vectors.at(builder.add(_stepped(builder, c, c_row, i), column))
                for (i, j), column in columns.items()
            }
            next_a, next_b = (cgutils.alloca_once_value(builder, first) for first in (a, b))
            with cgutils.for_range(builder, k):
                a_now, b_now = _opaque(builder, builder.load(next_a)), builder.load(next_b)
                b_row_vectors = [vectors.load(_stepped(builder, b_now, b_panel, j)) for j in range(panels)]
                for i in range(rows):
                    factor = vectors.broadcast(_stepped(builder, a_now, a_row, i))
                    for j, vector in enumerate(b_row_vectors):
                        total = multiply_add(factor, vector, builder.load(sums[i, j]))
                        builder.store(total, sums[i, j])
                for place, step in ((next_a, a_column), (next_b, b_row)):
                    builder.store(builder.add(builder.load(place), step), place)
            with builder.if_then(accumulate):
                for cell, total in sums.items():
                    before = builder.load(outputs[cell], align=vectors.itemsize)
                    builder.store(builder.fadd(builder.load(total), before), total)
            for cell, total in sums.items():
                builder.store(builder.load(total), outputs[cell], align=vectors.itemsize)
            return context.get_dummy_value()

        address = types.intp
        return types.void(*[address] * 7, types.boolean, address, address, zero), codegen

    return block
