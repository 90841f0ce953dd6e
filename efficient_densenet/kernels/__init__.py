"""The sets of kernels for the shared engine: portable PyTorch, Triton and Numba.

`kernels_for` is the only place that chooses between them; each set implements `interface.Kernels`.
"""

import functools
import importlib
import importlib.util
import subprocess
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from .._tensors import device_type
from . import device_self_test, portable
from .interface import Kernels
from .numba_cpu.host import openmp

TRITON_CAPABILITIES = {torch.float32: (7, 0), torch.bfloat16: (8, 0), torch.float16: (7, 0)}
"""The lowest compute capability for which the Triton kernels compile, by dtype."""

NUMBA_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def kernels_for(values: Tensor, activations: Collection[str] = ()) -> Kernels:
    """The kernels for a stage with features like `values`, or for a stem with input `values`.

    The device's kernels where they can run, else portable. `activations` are the names of the activations that the
    kernels are to apply.
    """
    if triton_supports(values) and all(_triton_applies(each, values) for each in activations):
        from .triton_gpu.host import operations as triton_kernels

        return triton_kernels
    if numba_supports(values):
        from .numba_cpu.host import operations as numba_kernels

        return numba_kernels
    return portable


def kernel_set_name(values: Tensor) -> str:
    """A name of the kernels that `kernels_for` returns, for a report."""
    module: Any = kernels_for(values)
    packages = module.__name__.split(".")
    return "Triton" if "triton_gpu" in packages else "Numba" if "numba_cpu" in packages else "portable"


def triton_supports(values: Tensor) -> bool:
    """Whether the Triton kernels can run on `values`, which must not be a subclass: it may have no memory of its
    own."""
    if not (device_type(values) == "cuda" and type(values) is Tensor and values.dtype in TRITON_CAPABILITIES):
        return False
    if values.is_meta:  # nothing is launched
        return _imports_triton()
    return has_triton(values.device, values.dtype) and device_self_test.may_run(values.device, values.dtype)


def _triton_applies(activation: str, values: Tensor) -> bool:
    """Whether the Triton kernels, which can run on `values`, may apply an activation."""
    if activation == "relu" or not values.is_cuda:  # tested with the kernels; or not on a GPU, but traced or a test
        return True
    return device_self_test.may_run(values.device, values.dtype, activation)


def numba_supports(values: Tensor) -> bool:
    """Whether the Numba kernels can run on `values`. At the first use of a dtype, they are compiled."""
    if not (device_type(values) == "cpu" and type(values) is Tensor and values.dtype in NUMBA_DTYPES):
        return False
    return _numba_compiles(values.dtype)


def numba_multiplies(dtype: torch.dtype) -> bool:
    """Whether the Numba kernels multiply in this dtype without widening it first."""
    if dtype not in NUMBA_DTYPES or not _numba_compiles(dtype):
        return False
    return importlib.import_module(f"{__name__}.numba_cpu.host.launch").product_of(dtype).operand is dtype


@functools.cache
def _numba_compiles(dtype: torch.dtype) -> bool:
    """Whether Numba is installed and compiles the kernels for this dtype, which it does here at their first use, and
    PyTorch exports the functions that they call."""
    if importlib.util.find_spec("numba") is None or not openmp.available():
        return False
    try:
        importlib.import_module(f"{__name__}.numba_cpu.host.launch").compile_ahead(dtype)
    except Exception as error:  # a Numba release that is too old or too new may fail in any way
        found = f"Numba cannot compile the kernels for {str(dtype).removeprefix('torch.')} here"
        return _warn(f"{found} ({' '.join(str(error).split())[:300]})", ". Numba 0.62 and newer were tried")
    return True


@functools.cache
def _imports_triton() -> bool:
    """Whether Triton is installed and has all that the kernels use."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        importlib.import_module(f"{__name__}.triton_gpu.host.operations")
    except Exception as error:  # a Triton release that is too old or too new may fail in any way
        return _warn(f"Triton's kernels cannot be imported here ({error})")
    return True


@functools.cache
def has_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is installed and supports the dtype on the device, which is NVIDIA's."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < TRITON_CAPABILITIES[dtype] or not _imports_triton():
        return False
    try:
        # The first use may compile the launcher, with the system's C compiler.
        importlib.import_module("triton.runtime").driver.active.get_current_device()
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        return _warn(f"Triton cannot run here ({error})")
    return True


def _warn(found: str, remedy: str = "") -> bool:
    """False, with a warning of the slower kernels that run."""
    warnings.warn(
        f"{found}: the shared engine uses PyTorch's operations instead, which are slower{remedy}", stacklevel=3
    )
    return False
