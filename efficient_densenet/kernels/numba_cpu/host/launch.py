"""Launching a kernel with its record of integers and addresses: all launches go through `launch`. The kernels for a
dtype are compiled with the product that is the processor's fastest, all before the first of them runs."""

import ctypes
import functools
import logging
import typing
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import launches
from .. import arguments
from ..arguments import Fields, Within
from ..compiler.compilation import ARITHMETIC, Kernel, compile_kernel, is_stored, lock
from ..compiler.processor import has, is_found
from ..kernels import kernels
from ..kernels.gemm import gemm, gemm_bfloat16
from ..kernels.gemm_amx import gemm_amx
from . import openmp

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""The system call of x86-64, its operation `ARCH_REQ_XCOMP_PERM`, and the component of the processor's state."""


class Product(NamedTuple):
    """The dtype of the operands in tiles and packed panels, and the GEMM."""

    operand: torch.dtype
    gemm: Kernel


@functools.cache
def product_of(dtype: torch.dtype) -> Product:
    """The product for matrices of this dtype. Sums are in the dtype of the arithmetic.

    Processors with AMX run AVX512-BF16 more slowly than float32 instructions (docs/benchmarks.md), so if Linux does not
    permit AMX on them, operands are widened to float32.
    """
    if dtype is torch.bfloat16 and has("amx") and permits_amx():
        return Product(torch.bfloat16, gemm_amx)
    if dtype is torch.bfloat16 and has("avx512_bf16") and not is_found("amx"):
        return Product(torch.bfloat16, gemm_bfloat16)
    return Product(ARITHMETIC[dtype], gemm)


def permits_amx() -> bool:
    """Request AMX's tile registers from Linux. Repeated requests are no error."""
    try:
        return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
    except (OSError, AttributeError):  # another system
        return False


def compile_ahead(dtype: torch.dtype) -> None:
    """Compile all kernels for matrices of this dtype that are not on disk. Raises Numba's exception where it cannot."""
    product = product_of(dtype)
    requests = [(product.gemm, ARITHMETIC[dtype], None), *((each, dtype, product.operand) for each in kernels.ALL)]
    with lock:
        if missing := [request for request in requests if not is_stored(*request)]:
            ahead = "python -m efficient_densenet.doctor --warmup does it ahead"
            message = f"compiling kernels for {str(dtype).removeprefix('torch.')}, about 20 s ({ahead})"
            logging.getLogger("efficient_densenet").warning(message)  # Python shows warnings by default
        for request in missing:
            compile_kernel(*request)


def launch(kernel: Kernel, like: Tensor, threads: int, record: tuple[typing.Any, ...]) -> None:
    """Launch the kernel for matrices like this one. `record` has its arguments (`Fields`) and keeps tensors alive until
    the kernel has finished. On the meta device there is nothing to compute."""
    if like.is_meta:
        return
    assert kernel.pack is not None  # it is no subroutine
    if (recorder := launches.recorder()) is not None:
        fields = [each if isinstance(each, int) else _argument(recorder, each) for each in record]
        recorder.launched(Launches, (address(kernel, like.dtype), threads), fields)
    packed = kernel.pack(*[each if isinstance(each, int) else each.data_ptr() or _null(each) for each in record])
    openmp.run(address(kernel, like.dtype), threads, packed)


class Launches(launches.Launches):
    """Launches whose records lie in one array, into which each run writes its addresses."""

    def __init__(self, recorded: Sequence[tuple[typing.Any, Sequence[typing.Any]]]) -> None:
        self._regions = list[tuple[int, int, int]]()
        numbers, places = list[int](), list[tuple[int, int, int]]()
        for (kernel, threads), fields in recorded:
            self._regions.append((kernel, 8 * len(numbers), threads))
            for each in fields:
                is_integer = isinstance(each, int)
                if not is_integer:
                    places.append((len(numbers), each.memory, each.offset))
                numbers.append(int(each) if is_integer else 0)
            numbers.append(0)  # `zero`, of any dtype
        self._records = np.array(numbers, np.int64)
        self._fields, self._memories, self._offsets = np.array(places, np.int64).reshape(-1, 3).T.copy()

    def __call__(self, run: launches.Run) -> None:
        records = self._records.copy()
        records[self._fields] = np.frombuffer(run.addresses, np.int64)[self._memories] + self._offsets
        start = records.ctypes.data
        for kernel, offset, threads in self._regions:
            openmp.run(kernel, threads, start + offset)


def _argument(recorder: launches.LaunchRecorder, each: Tensor | Within) -> launches.Place | int | None:
    """The place of an address among a kernel's arguments; 0 for a tensor without elements."""
    if isinstance(each, Within):
        return recorder.argument(each.tensor, each.offset)
    return recorder.argument(each) if each.data_ptr() else 0


def _null(tensor: Tensor) -> int:
    """The address of a tensor without elements. One on the meta device beside others would end the process."""
    if tensor.is_meta:
        raise RuntimeError("found tensors on the meta device and on the CPU in one stage: move the model or its input")
    return 0


@functools.cache
def address(kernel: Kernel, dtype: torch.dtype) -> int:
    """The address of the compiled kernel, which takes no lock here."""
    return compile_kernel(kernel, dtype, product_of(dtype).operand)


def gemm_address(weight: Tensor) -> int:
    """The address of the GEMM with this weight; on the meta device nothing is compiled."""
    return 0 if weight.is_meta else gemm_address_for(weight.dtype)


@functools.cache
def gemm_address_for(dtype: torch.dtype) -> int:
    """The address of the GEMM for matrices of this dtype."""
    return compile_kernel(product_of(dtype).gemm, ARITHMETIC[dtype])


@functools.cache
def openmp_functions() -> Fields:
    functions = openmp.functions()
    return tuple(functions[name] for name in typing.get_type_hints(arguments.OpenMP))
