"""What every other engine is compared with: concatenate, normalise, rectify, convolve, and keep everything."""

from collections.abc import Callable

from torch import Tensor, nn

RunFirstHalf = Callable[[nn.Module, list[Tensor]], Tensor]
"""How the first half of a layer is run."""


def run_first_half(layer: nn.Module, features: list[Tensor]) -> Tensor:
    return layer.first_half(*features)
