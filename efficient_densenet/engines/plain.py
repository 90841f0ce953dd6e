"""The reference engine: concatenate, normalize, ReLU and convolve as torch modules, and save all for the backward."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

Layer: TypeAlias = Any
"""A module with `norm1` and `first_half(*features)`: a dense layer of the models, or the first half of another."""

RunFirstHalf = Callable[[Layer, list[Tensor]], Tensor]
"""How an engine runs a layer's first half (concatenation, norm, ReLU, first convolution) on a list of features."""


def run_first_half(layer: Layer, features: list[Tensor]) -> Tensor:
    return layer.first_half(*features)
