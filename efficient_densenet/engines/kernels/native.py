"""What PyTorch's own libraries hold that a program outside Python can call: matrix products, and a team of threads.

Their names are BLAS's and GNU OpenMP's, the same for decades, and they lie in PyTorch's releases for Linux. A second
team would fight PyTorch's own for the processors, since threads wait by spinning.
"""

import ctypes
import functools
from pathlib import Path

import torch

_PRODUCTS = {torch.float32: "sgemm_", torch.float64: "dgemm_"}


@functools.cache
def available() -> bool:
    try:
        return all(functions(dtype) for dtype in _PRODUCTS)
    except (OSError, AttributeError):
        return False


@functools.cache
def functions(dtype: torch.dtype) -> dict[str, int]:
    """The addresses of a matrix product of such numbers, and of those that tell a thread which of how many it is."""
    asked = {"thread_number": _team().omp_get_thread_num, "num_threads": _team().omp_get_num_threads}
    asked["product"] = getattr(_library("libtorch_cpu.so"), _PRODUCTS[dtype])
    return {name: ctypes.cast(function, ctypes.c_void_p).value for name, function in asked.items()}


def run(program: int, threads: int, job: bytes) -> None:
    """Have at most so many threads of the team call the function at address `program` with `job`, and wait for them."""
    _team().GOMP_parallel(program, job, threads, 0)


@functools.cache
def _team() -> ctypes.CDLL:
    library = _library("libgomp*.so*")
    library.GOMP_parallel.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint
    library.GOMP_parallel.restype = None
    return library


def _library(pattern: str) -> ctypes.CDLL:
    """One of PyTorch's, which it has loaded itself."""
    found = sorted((Path(torch.__file__).parent / "lib").glob(pattern))
    if not found:
        raise OSError(f"PyTorch came without {pattern}")
    return ctypes.CDLL(str(found[0]))
