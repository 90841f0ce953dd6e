"""The inputs on which a trial may run a module."""

from collections.abc import Iterable
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
        fixed_sides: the last sides, where a layer takes no others, such as an nn.LayerNorm over the rows of an image.
        dtype: the dtype of inputs and parameters; None for double precision, where the device has it.
    """

    channels: int
    size: int = 3
    fixed_sides: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def shape(self, images: int, dims: int, extra_size: int = 0) -> tuple[int, ...]:
        free = dims - len(self.fixed_sides)
        return (images + extra_size, self.channels, *[self.size + extra_size] * free, *self.fixed_sides)

    def __str__(self) -> str:
        precision = "double precision" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"one tensor of {self.channels} channels and {self.size} pixels a side in {precision}"


def samples(module: nn.Module, channels: Iterable[int]) -> list[Sample]:
    """The inputs on which `module` may run, the usual one first."""
    norms = [each.normalized_shape for each in module.modules() if type(each) is nn.LayerNorm]
    sides: list[tuple[int, tuple[int, ...]]] = [(3, ()), (_LARGER_SIZE, ())]
    if norms and len(norms[0]) <= dimensions(module):
        sides.append((_LARGER_SIZE, norms[0]))
    return [
        Sample(each, size, fixed, dtype)
        for dtype in (None, torch.float32)
        for each in channels
        for size, fixed in sides
    ]


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
