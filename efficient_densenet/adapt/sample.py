"""The inputs on which a trial may run a module."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from .._dimensions import DIMENSIONS
from .structure import first_conv

IMAGES = 2
_LARGER_SIZE = 16
"""Pixels a side where few are not enough, as for padding by reflection."""


class Sample(NamedTuple):
    """The input of a trial.

    Attributes:
        channels, size: the channels, and the pixels a side.
        dtype: the dtype of inputs and parameters; None for double precision, where the device has it.
    """

    channels: int
    size: int = 3
    dtype: torch.dtype | None = None

    def shape(self, images: int, dims: int, extra_size: int = 0) -> tuple[int, ...]:
        return (images + extra_size, self.channels, *[self.size + extra_size] * dims)

    def __str__(self) -> str:
        precision = "double precision" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"one tensor of {self.channels} channels and {self.size} pixels a side in {precision}"


def samples(channels: int) -> list[Sample]:
    """The inputs on which a module that reads so many channels may run, the usual one first."""
    return [Sample(channels, size, dtype) for dtype in (None, torch.float32) for size in (3, _LARGER_SIZE)]


def dimensions(module: nn.Module) -> int:
    """The dimensions of the images that `module` takes: those of its first convolution if that is torch's, otherwise
    of a batch norm."""
    conv = first_conv(module)
    if isinstance(conv, _ConvNd):
        return len(conv.kernel_size)
    of_norms = (
        dims for each in module.modules() for dims in DIMENSIONS if isinstance(each, DIMENSIONS[dims].BatchNorm)
    )
    return next(of_norms, max(each.dim() for each in conv.parameters()) - 2)
