"""The operands of the Triton kernels' products: `tl.dot` on a GPU cuts float32 to TF32, so they are rounded before."""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl


@triton.jit
def round_to_tf32(x):
    """float32 to the nearest of TF32, 10 bits of fraction, ties away from zero, as `cvt.rna.tf32.f32`.

    In integer arithmetic, which the interpreter runs too: half an ulp is added to the bits, and a carry out of the
    fraction is the next exponent. NaN, whose bits might carry into the sign, stays.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit
def as_operand(x, like, PRECISION: tl.constexpr):
    """`x` in the dtype of the tensor `like`, for `tl.dot(..., input_precision=PRECISION)`."""
    operand = x.to(like.dtype)
    if PRECISION == "tf32" and like.dtype == tl.float32:
        operand = round_to_tf32(operand)
    return operand
