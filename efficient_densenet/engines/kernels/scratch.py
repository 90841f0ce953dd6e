"""Scratch that is allocated once for all the tiles of all the layers of a pass.

Asking the system for pages again and again would take longer than some of the arithmetic does.
"""

import contextlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

Held = dict[tuple[str, torch.dtype], Tensor]

_local = threading.local()


@contextlib.contextmanager
def reused(held: Held | None = None) -> Iterator[None]:
    """Within, in this thread, `take` gives the same memory for the same name; `held` is what it has given before."""
    outer = getattr(_local, "held", None)
    _local.held = {} if held is None else held
    try:
        yield
    finally:
        _local.held = outer


def take(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory, no longer that of whoever took it before by this name."""
    size = math.prod(shape)
    return room(name, size, dtype, device)[:size].view(shape)


def room(name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same for so many numbers or more."""
    held = getattr(_local, "held", None)
    if held is None:
        return torch.empty(size, dtype=dtype, device=device)
    found = held.get((name, dtype))
    if found is None or found.numel() < size:
        held[name, dtype] = found = None  # before the larger one is made
        held[name, dtype] = found = torch.empty(size, dtype=dtype, device=device)
    return found
