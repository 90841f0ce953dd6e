"""The reference engine: concatenate, normalize, ReLU and convolve as torch modules, and save all for the backward."""

from collections.abc import Callable

from torch import Tensor, nn

RunFirstHalf = Callable[[nn.Module, list[Tensor]], Tensor]
"""How an engine runs a layer's first half (concatenation, norm, ReLU, first convolution) on a list of features."""


def run_first_half(layer: nn.Module, features: list[Tensor]) -> Tensor:
    return layer.first_half(*features)
