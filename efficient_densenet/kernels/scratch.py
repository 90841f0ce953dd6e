"""Scratch buffers that are allocated once for all tiles of all layers in a forward or a backward.

Requesting pages from the system for each tile would take longer than some of the arithmetic.
"""

import contextlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

_local = threading.local()
"""Its attribute `held` is a dict: a buffer by (name, dtype), and the views of it that were taken, by (name, dtype,
shape), since many layers take the same views."""


@contextlib.contextmanager
def reused() -> Iterator[None]:
    """In this context and thread, `take` returns the same memory for the same name."""
    outer = getattr(_local, "held", None)
    _local.held = {}
    try:
        yield
    finally:
        _local.held = outer


def free() -> None:
    """Free the memory of the context."""
    _local.held.clear()


def take(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor. It shares its memory with all tensors that were taken with this name and dtype."""
    held = getattr(_local, "held", None)
    if held is None:
        return torch.empty(shape, dtype=dtype, device=device)
    view = held.get((name, dtype, shape))
    if view is None:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        view = buffer(name, math.prod(shape), dtype, device).as_strided(shape, strides)
        held[name, dtype, shape] = view
    return view


def buffer(name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized vector of at least `size` elements, which shares its memory as in `take`."""
    held = getattr(_local, "held", None)
    if held is None:
        return torch.empty(size, dtype=dtype, device=device)
    memory = held.get((name, dtype))
    if memory is None or memory.numel() < size:
        memory = None  # so that it and its views are freed before the larger one is allocated
        for key in [key for key in held if key[:2] == (name, dtype)]:
            del held[key]
        memory = held[name, dtype] = torch.empty(size, dtype=dtype, device=device)
    return memory
