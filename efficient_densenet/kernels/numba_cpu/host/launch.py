"""Launching a kernel with its record of integers and addresses: all launches go through `launch`."""

import functools
import typing

import torch
from torch import Tensor

from .. import arguments
from ..arguments import Fields
from ..compiler.compilation import ARITHMETIC, Kernel, compile_kernel
from . import openmp
from .products import product_of

_INTEGERS = {int, bool}
"""The types of fields that are no tensors: a lookup takes half the time of `isinstance`, 40 times for each launch."""


def launch(kernel: Kernel, like: Tensor, threads: int, record: tuple[typing.Any, ...]) -> None:
    """Launch the kernel for matrices like this one, with its record, `Fields`, which keeps tensors alive until the
    kernel has finished. On the meta device there is nothing to compute."""
    if like.is_meta:
        return
    assert kernel.pack is not None  # it is no subroutine
    packed = kernel.pack(*[each if type(each) in _INTEGERS else each.data_ptr() or _null(each) for each in record])
    openmp.run(address(kernel, like.dtype), threads, packed)


def _null(tensor: Tensor) -> int:
    """The address of a tensor without elements. One on the meta device beside others would end the process."""
    if tensor.is_meta:
        raise RuntimeError("found tensors on the meta device and on the CPU in one stage: move the model or its input")
    return 0


@functools.cache
def address(kernel: Kernel, dtype: torch.dtype) -> int:
    """The address of the compiled kernel."""
    found = compile_kernel(kernel, dtype, product_of(dtype).operand).address
    assert found is not None
    return found


def gemm_address(weight: Tensor) -> int:
    """The address of the GEMM with this weight; on the meta device nothing is compiled."""
    return 0 if weight.is_meta else gemm_address_for(weight.dtype)


@functools.cache
def gemm_address_for(dtype: torch.dtype) -> int:
    """The address of the GEMM for matrices of this dtype."""
    found = compile_kernel(product_of(dtype).gemm, ARITHMETIC[dtype]).address
    assert found is not None
    return found


@functools.cache
def openmp_functions() -> Fields:
    functions = openmp.functions()
    return tuple(functions[name] for name in typing.get_type_hints(arguments.OpenMP))
