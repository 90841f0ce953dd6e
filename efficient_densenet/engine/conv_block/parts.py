"""The parts of a dense block without norms: all that the engine knows about modules."""

from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

PADDING_MODES = {
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), "reflect"),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), "replicate"),
}


class ConvLayer(NamedTuple):
    """A convolution, the activation after it, if there is one, and the module that pads its input, if there is one."""

    conv: _ConvNd
    activation: nn.Module | None = None
    padding: Any = None

    @property
    def padding_mode(self) -> str:
        return self.conv.padding_mode if self.padding is None else PADDING_MODES[type(self.padding)]


class ConvBlock(NamedTuple):
    """The parts of a dense block without norms.

    Attributes:
        layers: each reads the block's input and the outputs of all layers before it.
        last: a convolution that reads all features, without an activation.
        newest_first, returns_features, new_features_only: as in `ConvBlockSpec`.
    """

    layers: tuple[ConvLayer, ...]
    last: ConvLayer | None = None
    newest_first: bool = False
    returns_features: bool = True
    new_features_only: bool = False

    @property
    def all_layers(self) -> tuple[ConvLayer, ...]:
        """The layers and the last convolution."""
        return self.layers if self.last is None else (*self.layers, self.last)

    @property
    def convolutions(self) -> list[_ConvNd]:
        return [layer.conv for layer in self.all_layers]
