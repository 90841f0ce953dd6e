"""Operations that Numba lacks: calls by address, pointers with an offset, prefetches and uninitialized stack buffers.

Also the options with which all functions of the kernels are compiled: NumPy's division, contraction of multiplications
and additions to fused multiply-adds, and no wrappers for Python.
"""

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .bfloat16 import bfloat16

COMPILE_OPTIONS = {"error_model": "numpy", "fastmath": {"contract"}}
_NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

inlined = njit(**COMPILE_OPTIONS, **_NO_WRAPPERS, inline="always")
compiled = njit(**COMPILE_OPTIONS, **_NO_WRAPPERS)
inlined_by_llvm = njit(**COMPILE_OPTIONS, **_NO_WRAPPERS, forceinline=True)
"""These three decorate the functions that kernels call."""


@intrinsic
def call_address(typingctx, address):
    """Call the C function `int f(void)` at the address. The result of a `void f(void)` is arbitrary."""

    def codegen(context, builder, signature, args):
        function = builder.inttoptr(args[0], ir.FunctionType(ir.IntType(32), []).as_pointer())
        return builder.sext(builder.call(function, []), ir.IntType(64))

    return types.intp(types.intp), codegen


@intrinsic
def call_subroutine(typingctx, address, args):
    """Call a `compilation.subroutine` at the address with a tuple of integers and, at its end, `zero`."""

    def codegen(context, builder, signature, args):
        values = cgutils.unpack_tuple(builder, args[1])
        function = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.intp, types.Tuple((*[types.intp] * (len(args) - 1), args[-1]))), codegen


@intrinsic
def pointer(typingctx, address, index, zero):
    """A pointer to element `index` of the array of `zero`'s dtype at the address.

    uint16 represents bfloat16, which NumPy does not know.
    """
    element = bfloat16 if zero == types.uint16 else zero

    def codegen(context, builder, signature, args):
        start = builder.inttoptr(args[0], context.get_data_type(element).as_pointer())
        return builder.gep(start, [args[1]])

    return types.CPointer(element)(types.intp, types.intp, zero), codegen


@intrinsic
def prefetch(typingctx, address):
    """Prefetch the cache line of the address for reading, into all levels. The address may be invalid."""

    def codegen(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], byte), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


def alloca(builder: ir.IRBuilder, kind: ir.Type, count: int) -> ir.Value:
    """An uninitialized array on the stack. `cgutils.alloca_once` would fill it with zeros, one by one."""
    with builder.goto_entry_block():
        return builder.alloca(ir.ArrayType(kind, count))


def stack_buffer(count: int):
    """An intrinsic: a pointer to `count` elements of `zero`'s dtype. LLVM knows that no other pointer aliases them."""

    @intrinsic
    def buffer(typingctx, zero):
        def codegen(context, builder, signature, args):
            element = context.get_value_type(signature.args[0])
            return builder.bitcast(alloca(builder, element, count), element.as_pointer())

        return types.CPointer(zero)(zero), codegen

    return buffer


def stack_bytes(count: int):
    """An intrinsic: the address of an uninitialized stack buffer of `count` bytes."""

    @intrinsic
    def buffer(typingctx, zero):
        def codegen(context, builder, signature, args):
            return builder.ptrtoint(alloca(builder, ir.IntType(8), count), ir.IntType(64))

        return types.intp(zero), codegen

    return buffer
