"""Compiles kernels with Numba, or loads them from disk: the one place where a kernel's machine code comes from.

Numba links all functions that a process compiles or loads by name, and names contain counters of the process. Kernels
from several processes may thus have the same name for different functions, of which Numba's linker keeps the first. So
a kernel is stored as the object file that Numba compiles, with all functions that the kernel calls, and is linked by
itself: no kernel sees the names in another kernel, whatever process compiled it.
"""

import functools
import hashlib
import importlib.resources
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from numba import from_dtype, types
from numba.core import config
from numba.core.registry import cpu_target
from numba.core.typing.templates import Signature

from ... import activations, disk_cache
from .intrinsics import COMPILE_OPTIONS
from .processor import features
from .records import packer, record_dtype

ARITHMETIC = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
"""The dtype of the arithmetic for each dtype of matrices."""

_ELEMENT = {torch.bfloat16: np.uint16}
"""NumPy dtypes that represent dtypes unknown to NumPy."""


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
    """Decorates a function with parameters for `integers` integers and `zero`, called by
    `intrinsics.call_subroutine`."""
    return _decorate(lambda zero, element, operand: types.void(*[types.intp] * integers, from_dtype(zero)))


def _decorate(
    signature: Callable[[np.dtype, np.dtype, np.dtype], Signature], pack: Callable[..., bytes] | None = None
) -> Callable[[Callable], Kernel]:
    return lambda function: Kernel(function, signature, pack)


class ObjectFile(NamedTuple):
    """An ELF object file, `code`, of one kernel and all functions that it calls, and the kernel's name in it."""

    kernel: bytes
    code: bytes


_linkers: list[Any] = []
"""The owners of all machine code, which must stay in memory: caches and records keep addresses of kernels."""


def _link(file: ObjectFile) -> int:
    """The address of the kernel in memory."""
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    linker = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    linker.add_object_file(llvm.ObjectFileRef.from_data(file.code))
    linker.finalize_object()
    _linkers.append(linker)
    return linker.get_function_address(file.kernel.decode())


lock = threading.RLock()
"""Held by the thread that compiles."""

os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def compile_kernel(kernel: Kernel, dtype: torch.dtype, operand: torch.dtype | None = None) -> int:
    """The address of the kernel for matrices of this dtype, loaded from disk if an undamaged file is there, else
    compiled.

    `operand` is the dtype of the operands of products, by default the dtype of the arithmetic. Threads that call this
    at the same time get the same kernel.
    """
    with lock:
        return load_or_compile(kernel, dtype, operand)


@functools.cache
def load_or_compile(kernel: Kernel, dtype: torch.dtype, operand: torch.dtype | None = None) -> int:
    """The address of `compile_kernel`, for one thread at a time."""
    signature = _signature(kernel, dtype, operand)
    name, key = kernel.function.__name__, _key(kernel.function, signature)
    stored = disk_cache.load(name, key)
    if stored is not None:
        _target().refresh()  # registers the functions of Numba's runtime that object files call
        return _link(ObjectFile(*stored.split(b"\0", 1)))
    file = _compile(kernel.function, signature)
    disk_cache.store(name, key, b"\0".join(file))
    return _link(file)


def is_stored(kernel: Kernel, dtype: torch.dtype, operand: torch.dtype | None = None) -> bool:
    """Whether `compile_kernel` would load the kernel from disk."""
    key = _key(kernel.function, _signature(kernel, dtype, operand))
    return disk_cache.load(kernel.function.__name__, key) is not None


def _signature(kernel: Kernel, dtype: torch.dtype, operand: torch.dtype | None) -> Signature:
    arithmetic = ARITHMETIC[dtype]
    return kernel.signature(*(_numpy_dtype(each) for each in (arithmetic, dtype, operand or arithmetic)))


def _compile(function: Callable, signature: Signature) -> ObjectFile:
    compiled: Any = numba.cfunc(signature, **COMPILE_OPTIONS)(function)
    library = compiled._library
    if library.has_dynamic_globals:
        raise RuntimeError(f"{function.__name__} contains an address of this process, as code with NUMBA_OPT=0 may do")
    _name, _kind, (code, _bitcode) = library.serialize_using_object_code()
    return ObjectFile(compiled.native_name.encode(), code)


def _key(function: Callable, signature: Signature) -> bytes:
    """A key of everything that the object file depends on."""
    target = _target().codegen().magic_tuple(), features()
    options = [getattr(config, name) for name in ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK")]
    versions = numba.__version__, llvmlite.__version__, _hash_of_sources()
    return repr((function.__module__, function.__qualname__, str(signature), target, options, versions)).encode()


def _target() -> Any:
    return cpu_target.target_context


@functools.cache
def _hash_of_sources() -> str:
    """A hash of all files but the host's, and of the formulas and constants of all sets: a kernel uses many files."""
    package = importlib.resources.files(__name__.rpartition(".compiler.")[0])
    folders = package, package / "compiler", package / "kernels"
    files = [(folder.name, file) for folder in folders for file in folder.iterdir()]
    beside = importlib.resources.files(activations.__name__.rpartition(".")[0])
    files += [("", beside / name) for name in ("activations.py", "interface.py")]
    sources = sorted((folder, file.name, file.read_bytes()) for folder, file in files if file.name.endswith(".py"))
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(_ELEMENT.get(dtype) or str(dtype).removeprefix("torch."))
