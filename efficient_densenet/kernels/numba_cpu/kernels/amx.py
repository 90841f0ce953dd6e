"""AMX: eight tile registers of 16 rows of 64 bytes, and the product of two tiles whose cells are pairs of bfloat16s.

Kernels call a function for each instruction; the number of a tile register is a literal. A thread
configures its tile registers before it uses them and releases them afterwards. Each thread has its own tile registers;
Linux's permission to use them is the process's, and its forks inherit it.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

TILE_ROWS = 16
"""Also the number of cells of a row, and of the float32 columns of a tile of sums."""

_ROW_BYTES = 64
_NUM_TILES = 8

_PALETTE, _BYTES_OF_ROWS, _NUMBERS_OF_ROWS, _CONFIGURATION_BYTES = 1, 16, 48, 64
"""The only palette, and a configuration's offsets for each tile's bytes in a row and number of rows, and its size."""


def _call(builder: ir.IRBuilder, name: str, *operands: ir.Value) -> None:
    function = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", fnty=function), operands)


def _byte(number: types.IntegerLiteral) -> ir.Constant:
    return ir.Constant(ir.IntType(8), number.literal_value)


def _at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def _configuration() -> bytearray:
    """The configuration in which all tiles have their largest size."""
    configuration = bytearray(_CONFIGURATION_BYTES)
    configuration[0] = _PALETTE
    for tile in range(_NUM_TILES):
        configuration[_BYTES_OF_ROWS + 2 * tile] = _ROW_BYTES
        configuration[_NUMBERS_OF_ROWS + tile] = TILE_ROWS
    return configuration


@intrinsic
def configure(typingctx):
    """Prepare this thread's tile registers."""

    def codegen(context, builder, signature, args):
        content = ir.Constant(ir.ArrayType(ir.IntType(8), _CONFIGURATION_BYTES), _configuration())
        name = builder.module.get_unique_name("tile_configuration")
        variable = ir.GlobalVariable(builder.module, content.type, name)
        variable.linkage, variable.global_constant, variable.initializer = "internal", True, content
        _call(builder, "ldtilecfg", builder.bitcast(variable, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def release(typingctx):
    """Reset this thread's tile registers."""

    def codegen(context, builder, signature, args):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def clear(typingctx, tile):
    """tile = 0."""

    def codegen(context, builder, signature, args):
        _call(builder, "tilezero", _byte(tile))
        return context.get_dummy_value()

    return types.void(tile), codegen


@intrinsic(prefer_literal=True)
def load(typingctx, tile, address, stride):
    """tile = the 16 rows at the address, `stride` bytes apart."""

    def codegen(context, builder, signature, args):
        _call(builder, "tileloadd64", _byte(tile), _at(builder, args[1]), args[2])
        return context.get_dummy_value()

    return types.void(tile, types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def store(typingctx, tile, address, stride):
    """The 16 rows at the address, `stride` bytes apart, = tile."""

    def codegen(context, builder, signature, args):
        _call(builder, "tilestored64", _byte(tile), _at(builder, args[1]), args[2])
        return context.get_dummy_value()

    return types.void(tile, types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def multiply_add(typingctx, sums, a, b):
    """Tile sums (16, 16) += tile a (16, 16 cells) @ tile b (16 rows of cells, 16)."""

    def codegen(context, builder, signature, args):
        _call(builder, "tdpbf16ps", *map(_byte, (sums, a, b)))
        return context.get_dummy_value()

    return types.void(sums, a, b), codegen
