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


class Kernel(NamedTuple):
    """A function that is called by its address, and its signature for each dtype. `pack` writes a kernel's record."""

    function: Callable
    signature: Callable[[np.dtype], Signature]
    pack: Callable[..., bytes] | None = None


def kernel(arguments: type) -> Callable[[Callable], Kernel]:
    """Decorates a kernel: each thread calls it with the address of a record of these arguments."""
    return _decorate(
        lambda dtype: types.void(types.CPointer(from_dtype(record_dtype(arguments, dtype)))), packer(arguments)
    )


def subroutine(integers: int) -> Callable[[Callable], Kernel]:
    """Decorates what kernels call, with so many integers and `zero`, through `intrinsics.call_subroutine`."""
    return _decorate(lambda dtype: types.void(*[types.intp] * integers, from_dtype(dtype)))


def _decorate(
    signature: Callable[[np.dtype], Signature], pack: Callable[..., bytes] | None = None
) -> Callable[[Callable], Kernel]:
    return lambda function: Kernel(function, signature, pack)


class _CachedCFunc(CFunc):
    """What `numba.cfunc` returns, with our cache."""

    def enable_caching(self) -> None:
        self._cache = open_cache(self.__wrapped__)


@functools.cache
def compile_kernel(kernel: Kernel, dtype: torch.dtype) -> CFunc:
    """The kernel for matrices of this dtype: from disk if it was compiled before, where it is kept and unharmed."""
    signature = kernel.signature(np.dtype(str(dtype).removeprefix("torch.")))
    compiled = _CachedCFunc(kernel.function, (signature.args, signature.return_type), {}, dict(COMPILE_OPTIONS))
    compiled.enable_caching()
    compiled.compile()
    return compiled
