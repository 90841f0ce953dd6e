"""Launching a kernel with its record of integers and addresses: all launches go through `launch`."""

import functools
import typing
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ... import launches
from .. import arguments
from ..arguments import Fields, Within
from ..compiler.compilation import ARITHMETIC, Kernel, compile_kernel
from . import openmp
from .products import product_of


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
