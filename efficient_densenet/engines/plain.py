"""What every other engine is compared with: concatenate, normalise, rectify, convolve, and keep everything."""

from torch import Tensor, nn


def squeeze(layer: nn.Module, features: list[Tensor]) -> Tensor:
    return layer.squeeze(*features)
