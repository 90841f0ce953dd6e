"""PyTorch's own OpenMP thread team, for a kernel outside Python.

A second team would compete with it for the processors, since waiting threads spin. The names are GNU OpenMP's, the same
for decades, and PyTorch's releases for Linux have them.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch


@functools.cache
def available() -> bool:
    try:
        return bool(functions())
    except (OSError, AttributeError):
        return False


@functools.cache
def functions() -> dict[str, int]:
    """Addresses of what a kernel calls: its thread's number, the number of threads, and the barrier between them."""
    library = _library()
    names = {
        "thread_number": library.omp_get_thread_num,
        "num_threads": library.omp_get_num_threads,
        "barrier": library.GOMP_barrier,
    }
    return {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in names.items()}


def run(kernel: int, threads: int, record: bytes) -> None:
    """A parallel region: at most so many threads call the kernel at this address with the record's."""
    _parallel()(kernel, record, threads, 0)


@functools.cache
def _parallel() -> Callable[[int, bytes, int, int], None]:
    parallel = _library().GOMP_parallel
    parallel.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint
    parallel.restype = None
    return parallel


@functools.cache
def _library() -> ctypes.CDLL:
    """PyTorch's, through which those symbols are found that it was bound to when it was loaded."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
