"""Compiles kernels with Numba and keeps them on disk.

Numba's cache compares the source file of the compiled function alone, while a kernel calls functions from all files of
this folder. A kernel's qualified name, from which Numba makes the names of the cache's files, therefore begins with a
hash of all of them. Files with another hash are removed when a kernel is compiled again.
"""

import contextlib
import functools
import hashlib
import importlib.resources
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numba import cfunc, from_dtype, njit, types
from numba.core.ccallback import CFunc
from numba.core.typing.templates import Signature

from .arguments import record_dtype
from .intrinsics import COMPILE_OPTIONS


class Kernel(NamedTuple):
    """A function that is called by its address, and its signature for each dtype."""

    function: Callable
    signature: Callable[[np.dtype], Signature]


def kernel(arguments: type) -> Callable[[Callable], Kernel]:
    """Decorates a kernel: each thread calls it with the address of a record of these arguments."""
    return _decorate(lambda dtype: types.void(types.CPointer(from_dtype(record_dtype(arguments, dtype)))))


def subroutine(integers: int) -> Callable[[Callable], Kernel]:
    """Decorates what kernels call, with so many integers and `zero`, through `intrinsics.call_subroutine`."""
    return _decorate(lambda dtype: types.void(*[types.intp] * integers, from_dtype(dtype)))


def _decorate(signature: Callable[[np.dtype], Signature]) -> Callable[[Callable], Kernel]:
    def decorate(function: Callable) -> Kernel:
        function.__qualname__ = f"{_hash_of_sources()}.{function.__name__}"
        return Kernel(function, signature)

    return decorate


@functools.cache
def compile_kernel(kernel: Kernel, dtype: torch.dtype) -> CFunc:
    """The kernel for matrices of this dtype, from disk if it was compiled before and where Numba can write."""
    signature = kernel.signature(np.dtype(str(dtype).removeprefix("torch.")))
    try:
        compiled = cfunc(signature, cache=True, **COMPILE_OPTIONS)(kernel.function)
    except (RuntimeError, OSError):  # no directory for the cache is writable
        return cfunc(signature, **COMPILE_OPTIONS)(kernel.function)
    if compiled.cache_hits == 0:
        _remove_stale_files(kernel.function)
    return compiled


@functools.cache
def _hash_of_sources() -> str:
    folder = importlib.resources.files(__name__.rpartition(".")[0])
    sources = sorted((file.name, file.read_bytes()) for file in folder.iterdir() if file.name.endswith(".py"))
    return "sources_" + hashlib.sha256(repr(sources).encode()).hexdigest()[:16]


def _remove_stale_files(function: Callable) -> None:
    """Remove what Numba has cached of the kernel as other sources had it; what cannot be removed stays."""
    cache_path = njit(cache=True)(function).stats.cache_path
    assert cache_path is not None  # with cache=True
    current = f".{function.__qualname__}-"
    for suffix in ("nbi", "nbc"):
        for file in Path(cache_path).glob(f"*.sources_*.{function.__name__}-*.{suffix}"):
            if current not in file.name:
                with contextlib.suppress(OSError):  # another user's, in a directory that several write
                    file.unlink()
