"""PyTorch's own team of threads, for a program outside Python: a second team would fight it for the processors, since
threads wait by spinning.

The names are GNU OpenMP's, the same for decades, and PyTorch's releases for Linux have them.
"""

import ctypes
import functools
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
    """The addresses of what tells a thread which one it is, and of how many, and of what waits for the others."""
    library = _library()
    asked = {
        "thread_number": library.omp_get_thread_num,
        "num_threads": library.omp_get_num_threads,
        "wait": library.GOMP_barrier,
    }
    return {name: ctypes.cast(function, ctypes.c_void_p).value for name, function in asked.items()}


def run(program: int, threads: int, job: bytes) -> None:
    """Have at most so many threads of the team call the function at address `program` with `job`, and wait for them."""
    _library().GOMP_parallel(program, job, threads, 0)


@functools.cache
def _library() -> ctypes.CDLL:
    """PyTorch's own, through which those are found that it was bound to when it was loaded."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library.GOMP_parallel.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint
    library.GOMP_parallel.restype = None
    return library
