"""What this machine has, and what no run on it can be given."""

import contextlib
import os
from pathlib import Path

from .report import mib

_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def total_memory() -> int:
    """Bytes of the machine, or of the container if that may use fewer."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append(int(path.read_text()))
    return min(limits)


def check_memory(num_bytes: float, what: str, remedy: str) -> None:
    """Raise MemoryError if so many bytes are more than there are."""
    if num_bytes > total_memory():
        raise MemoryError(
            f"found that {what} would take {mib(num_bytes)}, but this machine has {mib(total_memory())}: {remedy}"
        )
