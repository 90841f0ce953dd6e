"""bfloat16 as a Numba type, for array elements only. An element is widened in operations with float32 or float64, and a
result is rounded to the nearest bfloat16, ties to even, where it is stored. NaN stays NaN.

A bfloat16 is the upper half of a float32, so both conversions are a few integer instructions, which LLVM vectorizes.
"""

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_cast
from numba.core.typeconv.castgraph import Conversion
from numba.extending import models, register_model

_HALF, _WHOLE = ir.IntType(16), ir.IntType(32)
_QUIET_NAN = 0x7FC0


class _LLVMBFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LLVMBFloat)

    def __hash__(self) -> int:
        return hash(_LLVMBFloat)


BFLOAT = _LLVMBFloat()


class BFloat16(types.Type):
    """Reads are promoted to float32; a float32 is converted to bfloat16 only where it is stored."""

    def __init__(self) -> None:
        super().__init__(name="bfloat16")

    def can_convert_to(self, typingctx, other):
        return {types.float32: Conversion.promote, types.float64: Conversion.safe}.get(other)

    def can_convert_from(self, typingctx, other):
        return Conversion.unsafe if other in (types.float32, types.float64) else None


bfloat16 = BFloat16()


@register_model(BFloat16)
class _BFloat16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _HALF)


@lower_cast(BFloat16, types.Float)
def _widen(context, builder, fromty, toty, value):
    bits = builder.shl(builder.zext(value, _WHOLE), _WHOLE(16))
    return context.cast(builder, builder.bitcast(bits, ir.FloatType()), types.float32, toty)


@lower_cast(types.Float, BFloat16)
def _round(context, builder, fromty, toty, value):
    """Add 0x7FFF to the lower half, plus one if the upper half is odd: a carry into the upper half rounds up."""
    number = context.cast(builder, value, fromty, types.float32)
    bits = builder.bitcast(number, _WHOLE)
    odd = builder.and_(builder.lshr(bits, _WHOLE(16)), _WHOLE(1))
    rounded = builder.lshr(builder.add(builder.add(bits, odd), _WHOLE(0x7FFF)), _WHOLE(16))
    is_nan = builder.fcmp_unordered("uno", number, number)
    return builder.trunc(builder.select(is_nan, _WHOLE(_QUIET_NAN), rounded), _HALF)
