"""Running a kernel on PyTorch's own OpenMP threads, without Python.

A second team of threads would compete for the processors, since waiting threads spin. The symbols are GNU OpenMP's,
which have been stable for decades, and PyTorch's releases for Linux contain them.
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
    """Addresses of the functions that a kernel calls: the thread's number, the number of threads, and the barrier."""
    library = _library()
    names = {
        "thread_number": library.omp_get_thread_num,
        "num_threads": library.omp_get_num_threads,
        "barrier": library.GOMP_barrier,
    }
    return {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in names.items()}


def run(kernel: int, threads: int, record: bytes | int) -> None:
    """A parallel region: at most `threads` threads call the kernel at address `kernel` with the record's address, or
    with that of these bytes."""
    _parallel()(kernel, record, threads, 0)


@functools.cache
def _parallel() -> Callable[[int, bytes | int, int, int], None]:
    parallel = _library().GOMP_parallel
    parallel.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    parallel.restype = None
    return parallel


@functools.cache
def _library() -> ctypes.CDLL:
    """PyTorch's library, through which the symbols of its own OpenMP runtime are found."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
