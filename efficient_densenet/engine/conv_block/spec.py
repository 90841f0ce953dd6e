"""The specification of a dense block without norms: its settings as plain data, and the order of its tensors."""

import json
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.activations import ActivationSpec
from ..stage.spec import ChannelOrder, encode


class ConvTensors(NamedTuple):
    """The tensors of a convolution, whose bias may be None."""

    weight: Tensor
    bias: Tensor | None


class ConvSpec(NamedTuple):
    """The settings of a convolution and of the activation after it. A padding by other than zeros is of 3×3 pixels."""

    out_channels: int
    kernel_size: int
    dilation: int
    activation: ActivationSpec
    padding_mode: str = "zeros"


class ConvBlockSpec(NamedTuple):
    """The settings of a block.

    Attributes:
        dtype: the dtype of the convolutions and of the stored features, such as "float32".
        channels_last, last_channels_last: the memory formats of the features, and of the last convolution's output.
        in_channels: how many channels the block's input has.
        newest_first: a layer's output is concatenated before the features that it read, not after them.
        returns_features: the block returns the features; after the output of the last convolution, if there is one.
        new_features_only: it returns them without the block's input.
        layers: the settings of the layers.
        last: the settings of a convolution that reads all features.
    """

    dtype: str
    channels_last: bool
    last_channels_last: bool
    in_channels: int
    newest_first: bool
    returns_features: bool
    new_features_only: bool
    layers: tuple[ConvSpec, ...]
    last: ConvSpec | None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def convolutions(self) -> tuple[ConvSpec, ...]:
        return self.layers if self.last is None else (*self.layers, self.last)

    @property
    def num_outputs(self) -> int:
        return (self.last is not None) + self.returns_features

    def channels_read(self, i: int) -> int:
        """How many channels convolution i reads; after the last layer, how many features there are."""
        return self.in_channels + sum(layer.out_channels for layer in self.layers[:i])

    @property
    def order(self) -> ChannelOrder:
        return ChannelOrder(self.channels_read(len(self.layers)), self.newest_first)

    @property
    def columns_returned(self) -> slice:
        """The columns of the features that the block returns."""
        return self.order.slice(self.in_channels if self.new_features_only else 0, self.order.total)

    def columns_read(self, i: int) -> slice:
        """The columns of the features that convolution i reads."""
        return self.order.slice(0, self.channels_read(i))

    def columns_written(self, i: int) -> slice:
        """The columns of the features that layer i writes."""
        return self.order.slice(self.channels_read(i), self.channels_read(i + 1))

    @property
    def encoded(self) -> str:
        """The specification as the string that the operators take."""
        *settings, layers, last = self
        return encode(*settings, tuple(map(_encoded, layers)), None if last is None else _encoded(last))


@lru_cache(maxsize=4096)
def decode(text: str) -> ConvBlockSpec:
    """The specification whose `encoded` is `text`."""
    *settings, layers, last = json.loads(text)
    return ConvBlockSpec(*settings, layers=tuple(map(_decoded, layers)), last=None if last is None else _decoded(last))


def _encoded(conv: ConvSpec) -> tuple[Any, ...]:
    return conv.out_channels, conv.kernel_size, conv.dilation, tuple(conv.activation), conv.padding_mode


def _decoded(values: Any) -> ConvSpec:
    out_channels, kernel_size, dilation, activation, padding_mode = values
    return ConvSpec(out_channels, kernel_size, dilation, ActivationSpec(*activation), padding_mode)


def conv_tensors(tensors: Any) -> list[ConvTensors]:
    """A block's parameters, or one value for each of them, grouped by convolution."""
    return list(map(ConvTensors._make, zip(*[iter(tensors)] * len(ConvTensors._fields), strict=True)))
