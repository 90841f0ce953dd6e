"""The specification of a stage: its settings as plain data, which an operator takes as a string.

A compiler, a graph on disk or another process knows no modules. A stage's operators take tensors, and this.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch_private import constant_to_compilers
from ..memory_format import CHANNELS_LAST


class LayerSpec(NamedTuple):
    """The settings of a dense layer. `width` is the bottleneck's number of channels, 0 in a layer without one."""

    width: int
    dilation: int
    drop_rate: float
    keep_bottleneck: bool
    norm2_frozen: bool
    norm2_eps: float


class ConsumerSpec(NamedTuple):
    """The settings of a transition, or of a norm alone (`has_conv` is False)."""

    has_conv: bool
    pools: bool


class ChannelOrder(NamedTuple):
    """The columns of channels in a matrix, whose columns are filled from the oldest channel to the newest.

    The matrix lacks the channels before number `first`.
    """

    total: int
    newest_first: bool
    first: int = 0

    def slice(self, start: int, stop: int) -> slice:
        """The columns of the channels written as number `start` to `stop`."""
        if self.newest_first:
            return slice(self.total - stop, self.total - start)
        return slice(start - self.first, stop - self.first)


def columns_of(matrix: Tensor, columns: slice) -> Tensor:
    """`matrix[:, columns]`, a view, in half the time."""
    return matrix.narrow(1, columns.start, columns.stop - columns.start)


class NormConv(NamedTuple):
    """The tensors of a norm and of the convolution after it, whose bias may be None; a norm alone has both None."""

    norm_weight: Tensor
    norm_bias: Tensor
    conv_weight: Any
    conv_bias: Tensor | None


@dataclass
class StageSpec:
    """The settings of a stage: of layers, or a consumer, or both.

    Attributes:
        dtype: that of the convolutions, such as "float32".
        channels_last: the memory format of the input, and so of the outputs.
        in_channels, growth_rate: the channels of the stage's input, and those that each layer adds.
        newest_first, new_features_only: as in `BlockParts`.
        return_features: the stage returns the block's output beside the consumer's.
        frozen: the norms of the features use their running statistics; weight and bias may require gradients all the
            same.
        eps: of the norms of the features.
        sync_group: the name of the process group over which batch statistics are computed, if there is one.
        layers, consumer: their settings.
        updates: whether any norm has batch statistics.
        has_count: whether the processes of a sync group count their values.
        first_tensors, consumer_tensors: where the parameters of each layer begin, and the slice of the consumer's.
        first_columns, consumer_columns: the same for the columns of the matrix of statistics: those of the features
            come first, and the consumer's norm has its own only if it is frozen.
        column_widths: how many columns are written at once, in the columns' order.
        first_own: how many norms with columns of their own come before each layer.
    """

    dtype: str
    channels_last: bool
    in_channels: int
    growth_rate: int
    newest_first: bool
    new_features_only: bool
    return_features: bool
    frozen: bool
    eps: float
    sync_group: str | None
    layers: tuple[LayerSpec, ...]
    consumer: ConsumerSpec | None

    def __post_init__(self) -> None:
        self.torch_dtype: torch.dtype = getattr(torch, self.dtype)
        self.order = ChannelOrder(self.channels_read(len(self.layers)), self.newest_first)
        self.output_order = self.order._replace(first=self.in_channels if self.new_features_only else 0)
        self.num_output_channels = self.output_order.total - self.output_order.first
        self.returns_features = self.return_features or self.consumer is None
        self.num_outputs = (self.consumer is not None) + self.returns_features
        self.updates = not self.frozen or any(layer.width and not layer.norm2_frozen for layer in self.layers)
        self.has_count = self.sync_group is not None and self.updates
        tensors, columns, own = 0, 0 if self.frozen else self.order.total, 0
        self.first_tensors: list[int] = []
        self.first_columns: list[int] = []
        self.first_own: list[int] = []
        for i, layer in enumerate(self.layers):
            self.first_tensors.append(tensors)
            self.first_columns.append(columns)
            self.first_own.append(own)
            own += self.frozen + (layer.width > 0)
            tensors += len(NormConv._fields) * (2 if layer.width else 1)
            columns += self._norm1_width(i) + layer.width
        features = [self.in_channels, *[self.growth_rate] * len(self.layers)]
        self.column_widths = [] if self.frozen else features[::-1] if self.newest_first else features
        for i, layer in enumerate(self.layers):
            self.column_widths += [width for width in (self._norm1_width(i), layer.width) if width]
        consumer_columns = self.order.total if self.frozen and self.consumer is not None else 0
        self.consumer_tensors = slice(tensors, tensors + (len(NormConv._fields) if self.consumer is not None else 0))
        self.num_tensors = self.consumer_tensors.stop
        self.consumer_columns = slice(columns, columns + consumer_columns) if consumer_columns else None
        self.column_widths += [consumer_columns] if consumer_columns else []
        self.num_columns = columns + consumer_columns

    def memory_format(self, x: Tensor) -> torch.memory_format:
        return CHANNELS_LAST[x.dim()] if self.channels_last else torch.contiguous_format

    def channels_read(self, i: int) -> int:
        """How many channels layer i reads."""
        return self.in_channels + self.growth_rate * i

    def layer_tensors(self, i: int) -> slice:
        """The slice of the stage's parameters that layer i has: four for each norm, as in `NormConv`."""
        start = self.first_tensors[i]
        return slice(start, start + len(NormConv._fields) * (2 if self.layers[i].width else 1))

    def own_position(self, i: int, number: int) -> int | None:
        """The place of layer i's first or second norm among those with columns of their own; None without those."""
        return self.first_own[i] + (number == 2 and self.frozen) if self.frozen or number == 2 else None

    def norm1_columns(self, i: int) -> slice | None:
        """The columns of layer i's first norm in the matrix of statistics, None unless it is frozen."""
        start = self.first_columns[i]
        return slice(start, start + self._norm1_width(i)) if self.frozen else None

    def norm2_columns(self, i: int) -> slice:
        """The columns of layer i's second norm."""
        start = self.first_columns[i] + self._norm1_width(i)
        return slice(start, start + self.layers[i].width)

    def _norm1_width(self, i: int) -> int:
        return self.channels_read(i) if self.frozen else 0

    def bottleneck_position(self, i: int) -> int:
        """The place of layer i among those that keep their bottleneck."""
        return sum(1 for layer in self.layers[:i] if layer.keep_bottleneck)

    def dropout_position(self, i: int) -> int:
        """The place of layer i among those with dropout."""
        return sum(1 for layer in self.layers[:i] if layer.drop_rate)

    def running_position(self, i: int, number: int) -> int:
        """Where the running statistics of a frozen norm are among the operator's inputs: of the first or the second
        norm of layer i, or of the consumer's, which comes after all layers."""
        before = sum(self.frozen + (layer.width > 0 and layer.norm2_frozen) for layer in self.layers[:i])
        return 2 * (before + (number == 2 and self.frozen))

    @property
    def encoded(self) -> str:
        """As the operators take it."""
        *settings, layers, consumer = (getattr(self, name) for name in _FIELDS)
        return encode(*settings, tuple(map(tuple, layers)), None if consumer is None else tuple(consumer))


_FIELDS = tuple(field.name for field in fields(StageSpec))


@constant_to_compilers
def encode(*settings: Any) -> str:
    """Plain data as an operator takes it."""
    return json.dumps(settings)


@lru_cache(maxsize=4096)
def decode(text: str) -> StageSpec:
    """The specification whose `encoded` this is."""
    *settings, layers, consumer = json.loads(text)
    layers = tuple(LayerSpec(*layer) for layer in layers)
    return StageSpec(*settings, layers=layers, consumer=None if consumer is None else ConsumerSpec(*consumer))


def norm_convs(tensors: Sequence[Any], of: slice) -> list[NormConv]:
    """A slice of a stage's tensors, or of values that belong to them, with one entry for each norm."""
    width = len(NormConv._fields)
    return [NormConv(*tensors[start : start + width]) for start in range(of.start, of.stop, width)]
