"""The parts of a dense block without norms: all that the engine knows about modules."""

from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd


class ConvLayer(NamedTuple):
    """A convolution, and the activation after it, if there is one."""

    conv: _ConvNd
    activation: nn.Module | None = None


class ConvBlock(NamedTuple):
    """The parts of a dense block without norms.

    Attributes:
        layers: each reads the block's input and the outputs of all layers before it.
        last: a convolution that reads all features, without an activation.
        newest_first, returns_features, new_features_only: as in `ConvBlockSpec`.
    """

    layers: tuple[ConvLayer, ...]
    last: _ConvNd | None = None
    newest_first: bool = False
    returns_features: bool = True
    new_features_only: bool = False

    @property
    def convolutions(self) -> list[_ConvNd]:
        return [layer.conv for layer in self.layers] + ([] if self.last is None else [self.last])
