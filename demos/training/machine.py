"""What this machine has, and what no run on it can be given."""

import contextlib
import os
from pathlib import Path

import torch

from .report import mib

_WORKERS_PER_PROCESSOR = 8
"""More than one, since workers also wait for files."""
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def num_processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int:
    """Bytes of the machine, or of the container if that may use fewer."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append(int(path.read_text()))
    return min(limits)


def check_memory(num_bytes: float, what: str, remedy: str) -> None:
    """Raise MemoryError if so many bytes are more than there are."""
    available = total_memory()
    if num_bytes > available:
        raise MemoryError(
            f"found that {what} would take {mib(num_bytes)}, but this machine has {mib(available)}: {remedy}"
        )


def check_options(workers: int, lr: float) -> None:
    """Raise for numbers that an option may be, but not here."""
    at_most = max(16, _WORKERS_PER_PROCESSOR * num_processors())
    if workers > at_most:
        raise ValueError(
            f"workers is {workers}, but must be at most {at_most} on the {num_processors()} processors of this machine"
        )
    largest = torch.finfo(torch.float32).max
    if lr > largest:
        raise ValueError(f"lr is {lr:.3g}, but must be at most {largest:.3g}, the largest number of float32")
