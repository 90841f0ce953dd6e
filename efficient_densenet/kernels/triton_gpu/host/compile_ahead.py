"""Compiling Triton kernels into Triton's cache on disk, in several processes, none of which opens the device.

Triton's compiler holds Python's lock for a part of its time, so that threads of one process do not use all processors.
A kernel that does not compile here is left to whoever launches it, which finds the same error.

Used here beside `launch`: the methods of Triton's driver that its compiler calls.
"""

import contextlib
import importlib
import os
import signal
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from triton.runtime import JITFunction, driver

from .launch import recorded

_INDEX_BYTES = 2


class _Target:
    """A driver that says for which compute capability to compile, and has no device."""

    def __init__(self, capability: tuple[int, int]) -> None:
        compiler: Any = importlib.import_module("triton.backends.compiler")
        self._target = compiler.GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


class _Pointer:
    """What Triton reads of a tensor when it compiles. Memory that PyTorch allocates on a GPU is aligned to more than 16
    bytes, so that the offset decides whether a tensor is."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._address = tensor.dtype, int(tensor.storage_offset()) * tensor.itemsize

    def data_ptr(self) -> int:
        return self._address


def compile_ahead(functions: Iterable[Callable[[], object]], capability: tuple[int, int], processes: int) -> None:
    """Compile the kernels that the functions launch on the meta device, in up to so many processes, and in no more than
    there are processors for."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(processes, usable)
    if processes < 2 or not hasattr(os, "fork"):
        return
    groups = _recorded_groups(functions)
    taken, queue = os.pipe()
    os.write(queue, b"".join(i.to_bytes(_INDEX_BYTES, "little") for i in range(len(groups))))
    os.close(queue)
    children: list[int] = []
    try:
        while len(children) < min(processes, len(groups)):
            children.append(_start(groups, taken, capability))
    except OSError:  # there may be no more processes
        pass
    finally:
        os.close(taken)
        for child in children:
            os.waitpid(child, 0)


def _recorded_groups(functions: Iterable[Callable[[], object]]) -> list[Any]:
    """The launches, those of a kernel, of constants and of dtypes together: a process compiles nothing twice. The
    kernels with the most constants take the longest, and come first."""
    groups = defaultdict[Any, list[Any]](list)
    for function in functions:
        with recorded() as launches, contextlib.suppress(Exception):  # of what has no values on the meta device
            function()
        for prepared, tensors in launches:
            if isinstance(prepared.kernel, JITFunction):  # and not interpreted
                arguments = [None if each is None else _Pointer(each) for each in tensors]
                dtypes = [None if each is None else each.dtype for each in tensors]
                key = prepared.kernel.__name__, *prepared.constants.items(), *dtypes
                groups[key].append((prepared, arguments))
    return [groups[key] for key in sorted(groups, key=len, reverse=True)]


def _start(groups: Sequence[Any], taken: int, capability: tuple[int, int]) -> int:
    """Start a process that compiles the groups whose indices it reads from `taken`. Returns its number.

    It ends with this process, and when half of the time until the alarm of this one is over, so that the other half is
    there for what it has not compiled.
    """
    parent, (until_alarm, _) = os.getpid(), signal.getitimer(signal.ITIMER_REAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads hold no locks that are taken here
        child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, until_alarm / 2)
        for output in (1, 2):  # nobody reads what a compiler prints here
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        driver_without_device: Any = _Target(capability)
        driver.set_active(driver_without_device)
        while os.getppid() == parent and (index := os.read(taken, _INDEX_BYTES)):
            for prepared, arguments in groups[int.from_bytes(index, "little")]:
                with contextlib.suppress(Exception):
                    prepared.kernel.warmup(*arguments, *prepared.numbers, grid=prepared.grid, **prepared.options)
    finally:
        os._exit(0)
