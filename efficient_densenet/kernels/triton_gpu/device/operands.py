"""The operands of the Triton kernels' products. `tl.dot` truncates float32 to TF32, so operands are rounded first."""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl


@triton.jit
def round_to_tf32(x):
    """Round float32 to the nearest TF32, with 10 bits of fraction and ties away from zero, as `cvt.rna.tf32.f32` does.

    Integer arithmetic also runs in the interpreter. Half an ulp is added to the bits, and a carry out of the fraction
    increments the exponent. NaN is returned unchanged: its bits might carry into the sign.
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
