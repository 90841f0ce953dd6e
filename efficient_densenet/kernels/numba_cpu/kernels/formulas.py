"""The activations of `activations.TABLE` on a row of channels, in place, as subroutines that kernels call by address.

Kernels are thus compiled once for all activations, and an activation when it is first used. They have a ReLU of their
own, for which they call nothing.
"""

import functools

import numpy as np
import torch

from ...activations import TABLE, bound
from ..compiler.compilation import Kernel, subroutine
from ..compiler.intrinsics import call_subroutine, inlined, stack_bytes
from .memory import elements, row_of
from .vector_math import functions_for, in_dtype

ROW = 256
"""The most channels of a row that are computed at once, on the stack."""

FORMULAS = "formula", "derivative"
"""The subroutines of an activation."""

row_buffer = stack_bytes(ROW * 8)


@functools.cache
def subroutine_of(name: str, formula: str, dtype: torch.dtype) -> Kernel:
    """One of `FORMULAS` of the activation, for arithmetic in this dtype."""
    numpy_dtype, definition = np.dtype(str(dtype).removeprefix("torch.")), TABLE[name]
    functions = functions_for(numpy_dtype)
    function = in_dtype(bound(getattr(definition, formula), functions, functions.expm1), numpy_dtype)

    def apply(row, count, constants, zero):
        """row = formula(row) of `count` channels."""
        values = elements(row, 0, count, zero)
        a, b = elements(constants, 0, 1, zero)[0], elements(constants, 1, 1, zero)[0]
        for j in range(count):
            values[j] = function(values[j], a, b)

    apply.__name__ = apply.__qualname__ = f"{name}_{formula}"
    return subroutine(integers=3)(apply)


@inlined
def normalized_row(input, row, left, width, buffer, zero):
    """z = scale · values + shift of `width` channels from `left` on, in the buffer, whose elements are returned."""
    values, z = row_of(input.values, row, left, width), elements(buffer, 0, width, zero)
    scale, shift = elements(input.scale, left, width, zero), elements(input.shift, left, width, zero)
    for j in range(width):
        z[j] = values[j] * scale[j] + shift[j]
    return z


@inlined
def apply_formula(formula, activation, width, buffer, zero):
    """Apply a formula of the activation, its address, to the buffer."""
    call_subroutine(formula, (buffer, width, activation.constants, zero))
