"""AMX: eight tile registers of 16 rows of 64 bytes, and the product of two tiles whose cells are pairs of bfloat16s.

Kernels call a function for each instruction; the number of a tile register is a literal. A thread
configures its tile registers before it uses them and releases them afterwards. Each thread has its own tile registers;
Linux's permission to use them is the process's, and its forks inherit it.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

TILE_ROWS = 16
"""The number of rows of a tile, of the cells of a row, and of the float32 columns of a tile of sums."""

_ROW_BYTES = 64
_NUM_TILES = 8

_PALETTE, _BYTES_OF_ROWS, _NUMBERS_OF_ROWS, _CONFIGURATION_BYTES = 1, 16, 48, 64
"""The only palette, and a configuration's offsets for each tile's bytes in a row and number of rows, and its size."""


def _call(builder: ir.IRBuilder, name: str, *operands: ir.Value) -> None:
    function = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", fnty=function), operands)


def _instruction(name: str):
    """The code of an instruction whose operands are the literal numbers of tile registers, or one number, an address
    and a stride."""

    def codegen(context, builder, signature, args):
        is_number = [isinstance(kind, types.IntegerLiteral) for kind in signature.args]
        operands = [
            ir.IntType(8)(kind.literal_value) if literal else value
            for literal, kind, value in zip(is_number, signature.args, args, strict=True)
        ]
        if False in is_number:
            operands[1] = builder.inttoptr(operands[1], ir.IntType(8).as_pointer())
        _call(builder, name, *operands)
        return context.get_dummy_value()

    return codegen


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
    return types.void(), _instruction("tilerelease")


@intrinsic(prefer_literal=True)
def clear(typingctx, tile):
    """tile = 0."""
    return types.void(tile), _instruction("tilezero")


@intrinsic(prefer_literal=True)
def load(typingctx, tile, address, stride):
    """tile = the 16 rows at the address, `stride` bytes apart."""
    return types.void(tile, types.intp, types.intp), _instruction("tileloadd64")


@intrinsic(prefer_literal=True)
def store(typingctx, tile, address, stride):
    """The 16 rows at the address, `stride` bytes apart, = tile."""
    return types.void(tile, types.intp, types.intp), _instruction("tilestored64")


@intrinsic(prefer_literal=True)
def multiply_add(typingctx, sums, a, b):
    """Tile sums (16, 16) += tile a (16, 16 cells) @ tile b (16 rows of cells, 16)."""
    return types.void(sums, a, b), _instruction("tdpbf16ps")
