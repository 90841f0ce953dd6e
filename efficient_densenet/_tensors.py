"""Tensors as the engines and kernels take them: device, dtype under autocast, accumulation dtype, memory format."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._compilers import constant_to_compilers

_local = threading.local()


def device_type(x: Tensor) -> str:
    """The type of x's device or, on the meta device, of the device for which it stands."""
    kind = x.device.type
    return getattr(_local, "meta_stands_for", kind) if kind == "meta" else kind


@contextlib.contextmanager
def meta_stands_for(device: str) -> Iterator[None]:
    """A context in which the engines of this thread allocate on the meta device what they would on "cpu" or "cuda", and
    launch no kernel: so a step's memory is known without its data."""
    before = getattr(_local, "meta_stands_for", "meta")
    _local.meta_stands_for = device
    try:
        yield
    finally:
        _local.meta_stands_for = before


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a convolution of `x` computes: autocast's, which does not apply to float64, or x's."""
    uses_autocast = autocast_enabled(x) and x.dtype != torch.float64
    return torch.get_autocast_dtype(autocast_device(x)) if uses_autocast else x.dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums and statistics of values in `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, in a tenth of the time where x has this dtype already."""
    return x if x.dtype is dtype else x.to(dtype)


def autocast_device(x: Tensor) -> str:
    """The device type whose autocast applies to x. Tensors that stand for those of another device have the CPU's, which
    every kind of checkpoint restores in a recomputation, also on a machine without a GPU."""
    kind = x.device.type
    return "cpu" if kind == "meta" and device_type(x) != kind else kind


def autocast_enabled(x: Tensor) -> bool:
    device = autocast_device(x)
    return _is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast_disabled(x: Tensor) -> contextlib.AbstractContextManager:
    """Turn autocast off on the device of `x`: the engines convert dtypes explicitly."""
    return torch.autocast(autocast_device(x), enabled=False) if autocast_enabled(x) else contextlib.nullcontext()


@constant_to_compilers
def _is_autocast_available(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last format by the number of a tensor's dimensions; signals (3 dimensions) have none."""


def formatted(x: Any, memory_format: torch.memory_format | None) -> Any:
    """x in `memory_format`, or unchanged if that is None."""
    return x if memory_format is None else x.contiguous(memory_format=memory_format)


def memory_format_of(x: Tensor) -> torch.memory_format:
    """The format in which PyTorch's norms and convolutions write what they compute from x. Where x is a part of a
    larger tensor, it is that of the order of its strides."""
    channels_last = CHANNELS_LAST.get(x.dim())
    if channels_last is None or x.shape[1] == 1 or x.is_contiguous():
        return torch.contiguous_format
    if x.is_contiguous(memory_format=channels_last) or _has_strides_of_channels_last(x):
        return channels_last
    return torch.contiguous_format


def _has_strides_of_channels_last(x: Tensor) -> bool:
    """Whether each dimension's stride is at least the extent of those before it, from the channels to the images."""
    if x.numel() == 0 or x.stride(1) == 0:
        return False
    extent = 0
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.stride(d) < extent:
            return False
        extent = x.stride(d) * x.shape[d]
    return True
