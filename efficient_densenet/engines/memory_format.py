"""Which memory format a tensor has: NCHW (contiguous) or NHWC (channels_last), in any number of dimensions."""

from typing import Any

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of a tensor's dimensions; signals (3 dimensions) have no such format."""


def formatted(x: Any, memory_format: torch.memory_format | None) -> Any:
    """x in a memory format, None being its own, which may be anything."""
    return x if memory_format is None else x.contiguous(memory_format=memory_format)


def memory_format_of(x: Tensor) -> torch.memory_format:
    channels_last = CHANNELS_LAST.get(x.dim())
    if channels_last is None or x.is_contiguous() or not x.is_contiguous(memory_format=channels_last):
        return torch.contiguous_format
    return channels_last
