"""Which memory format a tensor has: NCHW (contiguous) or NHWC (channels_last), in any number of dimensions."""

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of a tensor's dimensions; signals (3 dimensions) have no such format."""


def memory_format_of(x: Tensor) -> torch.memory_format:
    channels_last = CHANNELS_LAST.get(x.dim())
    if channels_last is None or x.is_contiguous() or not x.is_contiguous(memory_format=channels_last):
        return torch.contiguous_format
    return channels_last
