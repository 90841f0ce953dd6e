"""Compiles kernels with Numba, or loads them from disk: the one place where a kernel's machine code comes from."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numba import from_dtype, types
from numba.core.ccallback import CFunc
from numba.core.typing.templates import Signature

from .disk_cache import open_cache
from .intrinsics import COMPILE_OPTIONS
from .records import packer, record_dtype

ARITHMETIC = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
"""The dtypes of matrices that kernels are compiled for, and those of the arithmetic."""

_ELEMENT = {torch.bfloat16: np.uint16}
"""What stands for a dtype that NumPy does not know."""


class Kernel(NamedTuple):
    """A function that is called by its address, and its signature for the dtypes of the arithmetic, of matrices and of
    products' operands. `pack` writes a kernel's record."""

    function: Callable
    signature: Callable[[np.dtype, np.dtype, np.dtype], Signature]
    pack: Callable[..., bytes] | None = None


def kernel(arguments: type) -> Callable[[Callable], Kernel]:
    """Decorates a kernel: each thread calls it with the address of a record of these arguments."""
    return _decorate(
        lambda *dtypes: types.void(types.CPointer(from_dtype(record_dtype(arguments, *dtypes)))), packer(arguments)
    )


def subroutine(integers: int) -> Callable[[Callable], Kernel]:
    """Decorates what kernels call, with so many integers and `zero`, through `intrinsics.call_subroutine`."""
    return _decorate(lambda zero, element, operand: types.void(*[types.intp] * integers, from_dtype(zero)))


def _decorate(
    signature: Callable[[np.dtype, np.dtype, np.dtype], Signature], pack: Callable[..., bytes] | None = None
) -> Callable[[Callable], Kernel]:
    return lambda function: Kernel(function, signature, pack)


class _CachedCFunc(CFunc):
    """What `numba.cfunc` returns, with our cache."""

    def enable_caching(self) -> None:
        self._cache = open_cache(self.__wrapped__)


@functools.cache
def compile_kernel(kernel: Kernel, dtype: torch.dtype, operand: torch.dtype | None = None) -> CFunc:
    """The kernel for matrices of this dtype: from disk if it was compiled before, where it is kept and unharmed.

    The operands of products are in the dtype of the arithmetic, or in a narrower one.
    """
    arithmetic = ARITHMETIC[dtype]
    signature = kernel.signature(*(_numpy_dtype(each) for each in (arithmetic, dtype, operand or arithmetic)))
    compiled = _CachedCFunc(kernel.function, (signature.args, signature.return_type), {}, dict(COMPILE_OPTIONS))
    compiled.enable_caching()
    compiled.compile()
    return compiled


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(_ELEMENT.get(dtype) or str(dtype).removeprefix("torch."))
