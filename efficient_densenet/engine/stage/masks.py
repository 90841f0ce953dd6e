"""Dropout's masks: of a stage's layers as bits, an eighth of the memory that they take as bytes."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PER_BYTE = 8
"""Layer i has bit i % 8 of the bytes, (pixels, channels), of eight layers."""


def drawn(images: Tensor, dropout: Callable[[Tensor, float], Tensor], drop_rate: float) -> Tensor:
    """What `dropout` keeps of images like these, with the random numbers that it draws for them. On a CPU PyTorch's
    dropout draws them as here, but multiplies three tensors in their dtype besides."""
    if dropout is F.dropout and drop_rate < 1 and images.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.empty_like(images, dtype=torch.uint8).bernoulli_(1 - drop_rate)
    return dropout(torch.ones_like(images), drop_rate) != 0


def bits(masks: Sequence[Tensor], i: int) -> tuple[Tensor, int]:
    """The mask of layer i as zeros and a power of two, and this power. A recorded run cannot read them as booleans."""
    bit = 1 << i % PER_BYTE
    return masks[i // PER_BYTE].bitwise_and(bit), bit


def drop_(values: Tensor, mask: Tensor, drop_rate: float, bit: int = 1) -> Tensor:
    """Dropout in place of a layer's output or of its gradient, (pixels, channels); the mask is 0 or `bit`."""
    return torch.addcmul(values.new_zeros(()), values, mask, value=scale(drop_rate) / bit, out=values)


def scale(drop_rate: float) -> float:
    """What dropout multiplies the values with that it keeps."""
    return 1 / (1 - drop_rate or 1)
