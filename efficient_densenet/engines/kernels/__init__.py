"""The few operations that the shared engine is made of: in PyTorch, for GPUs in Triton, for processors with Numba."""

import functools
import importlib
import importlib.util
import subprocess
import warnings
from types import ModuleType

import torch
from torch import Tensor

from . import portable
from .numba_cpu import openmp as native

_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMPILED_DTYPES = (torch.float32, torch.float64)


def kernels_for(values: Tensor) -> ModuleType:
    """The set of operations for a stage with such values: made for the device where they can run, else the portable."""
    if runs_fused(values):
        return importlib.import_module(f"{__name__}.triton_gpu.operations")
    if runs_compiled(values):
        return importlib.import_module(f"{__name__}.numba_cpu.operations")
    return portable


def runs_fused(values: Tensor) -> bool:
    """Subclasses of tensors, which may have no memory of their own, are left to PyTorch."""
    usual = values.is_cuda and type(values) is Tensor and values.dtype in _FUSED_DTYPES
    return usual and _has_triton(values.device)


def runs_compiled(values: Tensor) -> bool:
    usual = values.device.type == "cpu" and type(values) is Tensor and values.dtype in _COMPILED_DTYPES
    return usual and _has_numba()


@functools.cache
def _has_numba() -> bool:
    """Whether Numba is installed and works, and PyTorch has what its programs call."""
    if importlib.util.find_spec("numba") is None or not native.available():
        return False
    try:
        importlib.import_module(f"{__name__}.numba_cpu.kernels").check()
    except Exception as error:  # of whatever kind: a release of Numba may be too old or too new in many ways
        warnings.warn(
            f"Numba cannot run here ({error}): the shared engine uses PyTorch's operations instead, which are slower",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _has_triton(device: torch.device) -> bool:
    """Whether Triton is installed and supports the device, as it does NVIDIA's from compute capability 8.0 on."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        driver = importlib.import_module("triton.runtime").driver
    except ImportError:
        return False
    try:
        driver.active.get_current_device()  # the first use may compile the launcher, with the system's C compiler
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        warnings.warn(
            f"Triton cannot run here ({error}): the shared engine uses PyTorch's operations instead, which is slower",
            stacklevel=2,
        )
        return False
    return True
