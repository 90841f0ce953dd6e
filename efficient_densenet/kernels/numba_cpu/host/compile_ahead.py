"""All kernels for a dtype, compiled before the first of them runs, by as many processes as there are processors.

The processes put the kernels into the cache on disk, where this process finds them. Whatever they fail to compile, this
process compiles.
"""

import contextlib
import math
import subprocess
from collections.abc import Iterable, Iterator, Sequence

import torch

from ... import disk_cache, python_process
from ..compiler.compilation import ARITHMETIC, Kernel, compile_kernel, is_stored, lock
from ..kernels import kernels
from .products import product_of

_SECONDS = 2
"""The mean time in which a processor compiles a kernel."""

_MOST_SECONDS = 120
"""The most time for which this process waits for the others."""

_Request = tuple[Kernel, torch.dtype, torch.dtype | None]
"""The arguments of `compile_kernel`."""


def compile_ahead(dtype: torch.dtype) -> None:
    """Compile all kernels for matrices of this dtype that are not on disk. Raises Numba's exception where it cannot."""
    with lock:
        missing = {name: request for name, request in _requests(dtype).items() if not is_stored(*request)}
        if not missing:
            return
        has_cache = disk_cache.directory() is not None
        processes = min(python_process.num_processors(), len(missing)) if has_cache else 1
        python_process.logger.warning(
            "compiling kernels for %s %s, about %d s",
            _name(dtype),
            "once (python -m efficient_densenet.doctor --warmup does it ahead)" if has_cache else "in this process",
            _SECONDS * math.ceil(len(missing) / processes),
        )
        names = list(missing)
        own, *others = (names[i::processes] for i in range(processes))
        with _processes(dtype, others):
            _compile(missing[name] for name in own)
        _compile(missing.values())


def _requests(dtype: torch.dtype) -> dict[str, _Request]:
    """By the names of the functions."""
    product = product_of(dtype)
    gemm = (product.gemm, ARITHMETIC[dtype], None)
    requests = [gemm, *((kernel, dtype, product.operand) for kernel in kernels.ALL)]
    return {request[0].function.__name__: request for request in requests}


def _compile(requests: Iterable[_Request]) -> None:
    for request in requests:
        compile_kernel(*request)


@contextlib.contextmanager
def _processes(dtype: torch.dtype, shares: Sequence[Sequence[str]]) -> Iterator[None]:
    """Compile the shares meanwhile, each in a process. All have ended at the end of the context."""
    started: list[subprocess.Popen] = []
    nobody_reads = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    try:
        with contextlib.suppress(OSError):  # there may be no more processes
            for share in shares:
                started.append(subprocess.Popen(python_process.command(__name__, _name(dtype), *share), **nobody_reads))
        yield
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_MOST_SECONDS)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(dtype: str, *names: str) -> None:
    """Compile these kernels, in a process that `compile_ahead` has started."""
    requests = _requests(getattr(torch, dtype))
    _compile(requests[name] for name in names)
