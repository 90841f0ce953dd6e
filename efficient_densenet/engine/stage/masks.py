"""Dropout's masks as bits: an eighth of the memory that they take as bytes."""

import math

import torch
from torch import Tensor


def pack(mask: Tensor) -> Tensor:
    """The bits of a mask of any shape. Bit k of a byte is of the k-th eighth, so that all are written side by side."""
    flat = mask.reshape(-1).to(torch.uint8)
    if len(flat) % 8:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    return (flat.view(8, -1) << _shifts(flat)).sum(0, dtype=torch.uint8)


def unpack(bits: Tensor, *shape: int) -> Tensor:
    """The mask of this shape that `pack` was given, as numbers 0 and 1: a recorded run cannot read them as booleans."""
    flat = (bits >> _shifts(bits)).bitwise_and_(1).view(-1)
    return flat[: math.prod(shape)].view(shape)


def drop_(values: Tensor, bits: Tensor, drop_rate: float) -> Tensor:
    """Dropout in place of a layer's output or of its gradient, (pixels, channels)."""
    return values.mul_(unpack(bits, *values.shape)).mul_(scale(drop_rate))


def scale(drop_rate: float) -> float:
    """What dropout multiplies the values with that it keeps."""
    return 1 / (1 - drop_rate or 1)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)[:, None]
