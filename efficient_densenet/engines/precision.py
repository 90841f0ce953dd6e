"""Autocast, for engines that choose the dtype of every operation themselves."""

import contextlib

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a convolution of `x` has: autocast's, which leaves float64 alone, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if autocast_enabled(x) and x.dtype != torch.float64 else x.dtype


def autocast_enabled(x: Tensor) -> bool:
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast_disabled(x: Tensor) -> contextlib.AbstractContextManager:
    """Turn autocast off on the device of `x`: inside an engine the dtypes are explicit."""
    device = x.device.type
    available = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if available else contextlib.nullcontext()
