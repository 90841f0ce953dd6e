"""exp, expm1, erf, sigmoid and where for the formulas of `activations`. LLVM can vectorize them, which are no calls.

Numba takes Python's constants as float64, and an operation of float32 and float64 as float64. So functions are made for
a dtype, with their constants in it.
"""

import functools
import math
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..compiler.intrinsics import inlined_by_llvm


def in_dtype(function: Callable[..., Any], dtype: np.dtype, **functions: Any) -> Callable[..., Any]:
    """The function with its constants in the dtype, and with other global variables."""
    assert isinstance(function, FunctionType)
    constants = tuple(dtype.type(each) if isinstance(each, float) else each for each in function.__code__.co_consts)
    code = function.__code__.replace(co_consts=constants)
    return inlined_by_llvm(FunctionType(code, function.__globals__ | functions, function.__name__))


@functools.cache
def functions_for(dtype: np.dtype) -> ModuleType:
    """A module of the functions for a dtype: Numba looks up functions in modules only."""
    functions: Any = ModuleType("vector_math")
    is_single = dtype == np.float32
    functions.where = inlined_by_llvm(_where)
    parts = {"exp_of_rest": in_dtype(_exp_of_rest_in_float32 if is_single else _exp_of_rest_in_float64, dtype)}
    parts["reduced"] = in_dtype(_reduced_in_float32 if is_single else _reduced_in_float64, dtype)
    functions.exp, functions.expm1 = in_dtype(_exp, dtype, **parts), in_dtype(_expm1, dtype, **parts)
    functions.erf = inlined_by_llvm(_erf_of_float64)
    if is_single:
        functions.erf = in_dtype(_erf_of_float32, dtype, exp=functions.exp)
    functions.sigmoid = in_dtype(_sigmoid, dtype, exp=functions.exp)
    return functions


@intrinsic
def power_of_two(typingctx, exponent):
    """2 to the power of an integer in a floating-point number, put together from bits; 0 for denormal numbers."""
    bits, mantissa, bias = {types.float32: (32, 23, 127), types.float64: (64, 52, 1023)}[exponent]

    def codegen(context, builder, signature, args):
        integer = ir.IntType(bits)
        is_number = builder.fcmp_ordered("ord", args[0], args[0])
        number = builder.select(is_number, args[0], ir.Constant(args[0].type, 0.0))  # NaN has no integer
        biased = builder.add(builder.fptosi(number, integer), integer(bias))
        return builder.bitcast(builder.shl(biased, integer(mantissa)), args[0].type)

    return exponent(exponent), codegen


def _where(condition, x, y):
    return x if condition else y


def _sigmoid(x):
    return 1.0 / (1.0 + exp(-x))  # noqa: F821 (`functions_for` binds it)


def _exp(x):
    """2ⁿ · exp(r). It is infinite a little early, and zero where exp is denormal; NaN stays NaN."""
    n, r = reduced(x)  # noqa: F821 (`functions_for` binds it)
    return (1.0 + exp_of_rest(r)) * power_of_two(n)  # noqa: F821


def _expm1(x):
    """exp(x) − 1, as 2ⁿ · (exp(r) − 1) + (2ⁿ − 1), which loses no digits near 0."""
    n, r = reduced(x)  # noqa: F821
    return exp_of_rest(r) * power_of_two(n) + (power_of_two(n) - 1.0)  # noqa: F821


def _reduced_in_float32(x):
    """n and r with x = n · ln(2) + r and |r| ≤ ln(2) / 2, of x between the numbers whose exp is 0 and infinite."""
    x = -88.0 if x < -88.0 else x
    x = 89.0 if x > 89.0 else x
    n = (x * 1.44269504 + 12582912.0) - 12582912.0  # 1.5 · 2²³: the sum is rounded to an integer
    return n, (x - n * 0.693359375) + n * 2.12194440e-4


def _reduced_in_float64(x):
    """n and r as in `_reduced_in_float32`."""
    x = -709.0 if x < -709.0 else x
    x = 710.0 if x > 710.0 else x
    n = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0  # 1.5 · 2⁵²
    return n, (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6


def _exp_of_rest_in_float32(r):
    """exp(r) − 1 by Taylor's polynomial."""
    p = 1.0 / 720.0 + r * (1.0 / 5040.0)
    p = 1.0 / 24.0 + r * (1.0 / 120.0 + r * p)
    return r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * p)))


def _exp_of_rest_in_float64(r):
    """exp(r) − 1 by Taylor's polynomial."""
    p = 1.0 / 479001600.0 + r * (1.0 / 6227020800.0)
    p = 1.0 / 3628800.0 + r * (1.0 / 39916800.0 + r * p)
    p = 1.0 / 40320.0 + r * (1.0 / 362880.0 + r * p)
    p = 1.0 / 720.0 + r * (1.0 / 5040.0 + r * p)
    p = 1.0 / 24.0 + r * (1.0 / 120.0 + r * p)
    return r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * p)))


def _erf_of_float32(x):
    """x · P(x²) for |x| < 1, else ±(1 − exp(−x²) · Q(1 / (1 + |x| / 2))): polynomials fitted to erf(x) / x and to
    exp(x²) · erfc(x) for |x| ≤ 4, beyond which erf is ±1 in float32."""
    y = abs(x)
    y = 4.0 if y > 4.0 else y
    s, t = y * y, 1.0 / (1.0 + 0.5 * y)
    p = 0.005220922 + s * (-0.00084831769 + s * (0.00011263541 + s * -9.6701478e-06))
    p = 1.12837923 + s * (-0.376126379 + s * (0.112837806 + s * (-0.0268653687 + s * p)))
    q = -0.10694798 + t * (0.56731367 + t * (-0.47389007 + t * 0.12010629))
    q = -0.00015916962 + t * (0.28498706 + t * (0.25921682 + t * (0.34943205 + t * q)))
    far = 1.0 if y > 1.0 else 0.0  # multiplied: LLVM would make a branch of a choice, and not vectorize it
    sign = -1.0 if x < 0.0 else 1.0
    return sign * (far * (1.0 - exp(-s) * q) + (1.0 - far) * (y * p))  # noqa: F821 (`functions_for` binds it)


def _erf_of_float64(x):
    return math.erf(x)
