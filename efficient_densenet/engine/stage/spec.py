"""The specification of a stage: its settings as plain data, which also determine the order of the saved tensors.

A compiler, a graph on disk or another process has no modules. The operators take tensors, and the settings as a string.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compilers import constant_to_compilers
from ..._tensors import CHANNELS_LAST
from ...kernels.activations import ActivationSpec
from ...kernels.interface import MEAN
from .masks import PER_BYTE


class LayerSpec(NamedTuple):
    """The settings of a dense layer. `width` is the bottleneck's number of channels, 0 in a layer without one.

    `activation1` and `activation2` follow its norms.
    """

    width: int
    dilation: int
    drop_rate: float
    keep_bottleneck: bool
    norm2_frozen: bool
    norm2_eps: float
    activation1: ActivationSpec = ActivationSpec()
    activation2: ActivationSpec = ActivationSpec()


class ConsumerSpec(NamedTuple):
    """The settings of a transition, of a norm alone (`has_conv` is False) or of a convolution alone (`has_norm` is)."""

    has_conv: bool
    pools: bool
    activation: ActivationSpec = ActivationSpec()
    has_norm: bool = True
    max_pools: bool = False
    drop_rate: float = 0.0


class ChannelOrder(NamedTuple):
    """The order of the channels in a matrix's columns. Channels are numbered from the oldest to the newest.

    The matrix lacks the channels before number `first`.
    """

    total: int
    newest_first: bool
    first: int = 0

    def slice(self, start: int, stop: int) -> slice:
        """The columns of the channels with the numbers `start` to `stop` (exclusive)."""
        if self.newest_first:
            return slice(self.total - stop, self.total - start)
        return slice(start - self.first, stop - self.first)


class NormSpec(NamedTuple):
    """A norm of a stage.

    Attributes:
        features: the columns of the features that it reads, or None for a norm inside a layer.
        columns: its columns in the matrix of statistics: those of the features, unless it is frozen or inside a layer.
        frozen: whether it uses its running statistics.
    """

    features: slice | None
    columns: slice
    frozen: bool


class NormConv(NamedTuple):
    """The tensors of a norm and of the convolution after it. A norm alone has no convolution, a convolution perhaps no
    bias; a convolution alone has no norm."""

    norm_weight: Tensor
    norm_bias: Tensor
    conv_weight: Any
    conv_bias: Tensor | None


@dataclass
class StageSpec:
    """The settings of a stage: of layers, or a consumer, or both.

    Attributes:
        dtype: the dtype of the convolutions, such as "float32".
        channels_last: the memory format of the outputs.
        keeps_channels_last: the consumer's output stays in channels_last, in which it is computed, for another stage.
        in_channels, growth_rate: how many channels the stage's input has, and how many each layer adds.
        newest_first, new_features_only: as in `BlockParts`.
        return_features: the stage returns the block's output after the consumer's.
        room: how many columns the matrix of features has before and after the stage's own, empty without any; the
            block's output is its place in autograd's graph alone then.
        skip: how many channels of the input, the last ones, another stage has stored in the features.
        frozen: the norms of the features use their running statistics; weight and bias may still require
            gradients.
        eps: the eps of the norms of the features.
        sync_group: the name of the process group over which batch statistics are computed, if there is one.
        layers, consumer: the settings of the layers and of the consumer.
        updates: whether any norm has batch statistics.
        has_count: whether the processes of a sync group count their values.
        norms: all norms, each layer's and then the consumer's.
        layer_norms: for each layer, the slice of its norms.
        num_columns: of the matrix of statistics. The features' come first, unless their norms are frozen: then each has
            its own.
        activations: the names of the activations between a norm and a convolution.
        sizes: each norm's channels, then the output channels, None for the consumer's, and the kernel size of the
            convolution after it.
    """

    dtype: str
    channels_last: bool
    keeps_channels_last: bool
    in_channels: int
    growth_rate: int
    newest_first: bool
    new_features_only: bool
    return_features: bool
    room: tuple[int, ...]
    skip: int
    frozen: bool
    eps: float
    sync_group: str | None
    layers: tuple[LayerSpec, ...]
    consumer: ConsumerSpec | None

    def __post_init__(self) -> None:
        self._encoded: str | None = None
        self._hash: int | None = None
        self.torch_dtype: torch.dtype = getattr(torch, self.dtype)
        self.order = ChannelOrder(self.channels_read(len(self.layers)), self.newest_first)
        first = self.in_channels if self.new_features_only else 0
        self.output_order = ChannelOrder(self.order.total, self.newest_first, first)
        self.num_output_channels = self.output_order.total - self.output_order.first
        self.returns_features = self.return_features or self.consumer is None
        self.num_outputs = (self.consumer is not None) + self.returns_features
        self.updates = not self.frozen or any(layer.width and not layer.norm2_frozen for layer in self.layers)
        self.has_count = self.sync_group is not None and self.updates
        self.layer_norms: list[slice] = []
        self.sizes: list[tuple[int, int | None, int]] = []
        frozen: list[bool | None] = []  # None for a norm of the features
        activations: list[ActivationSpec] = []
        for i, layer in enumerate(self.layers):
            channels, first = self.channels_read(i), len(frozen)
            if layer.width:
                self.sizes += [(channels, layer.width, 1), (layer.width, self.growth_rate, 3)]
                frozen += [None, layer.norm2_frozen]
                activations += [layer.activation1, layer.activation2]
            else:
                self.sizes.append((channels, self.growth_rate, 3))
                frozen.append(None)
                activations.append(layer.activation1)
            self.layer_norms.append(slice(first, len(frozen)))
        if self.consumer is not None:
            self.sizes.append((self.order.total, None, 1))
            frozen += [None] if self.consumer.has_norm else []
            activations += [self.consumer.activation] if self.consumer.has_conv and self.consumer.has_norm else []
        self.activations = sorted({each.name for each in activations})
        self.norms: list[NormSpec] = []
        self.num_columns = 0 if self.frozen else self.order.total
        for (channels, *_), inside in zip(self.sizes, frozen, strict=False):
            features = self.order.slice(0, channels) if inside is None else None
            if features is not None and not self.frozen:
                self.norms.append(NormSpec(features, features, False))
                continue
            columns = slice(self.num_columns, self.num_columns + channels)
            self.norms.append(NormSpec(features, columns, self.frozen if inside is None else inside))
            self.num_columns = columns.stop
        if len(self.norms) < len(self.sizes):  # a convolution alone
            columns = slice(0, self.order.total)
            self.norms.append(NormSpec(columns, columns, self.frozen))

    def __hash__(self) -> int:
        """Computed once, not while compilers trace: a specification is a part of the key of each eager run."""
        if self._hash is None:
            self._hash = hash(tuple(getattr(self, name) for name in _FIELDS))
        return self._hash

    @property
    def grad_groups(self) -> list[slice]:
        """The columns of the sums of gradients in matrices of their own, which are freed one by one: of the input, of
        the skipped channels and of the others, but for the last layer's, which no norm of such a stage reads."""
        if not self.skip:
            return [slice(0, self.order.total)]
        ends = 0, self.in_channels - self.skip, self.in_channels, self.order.total - self.growth_rate
        return [slice(start, stop) for start, stop in pairwise(ends) if start < stop]

    def own(self, features: Tensor) -> Tensor:
        """The stage's columns of the matrix of features."""
        return features[:, self.room[0] : self.room[0] + self.order.total] if self.room else features

    def values(self, features: Tensor, statistics: Tensor, columns: slice) -> Tensor:
        """What is stored in some of the stage's columns, by the statistics of these."""
        values = self.own(features)[:, columns]
        return values if self.frozen else (values + statistics[MEAN, columns]).to(values.dtype)

    def empty_images(self, x: Tensor, channels: int, shape: Sequence[int]) -> Tensor:
        """Uninitialized images like those that the stage returns beside the consumer's; `shape` is (N, *spatial)."""
        size, memory_format = (shape[0], channels, *shape[1:]), self.memory_format(x)
        return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format)

    def memory_format(self, x: Tensor) -> torch.memory_format:
        return CHANNELS_LAST[x.dim()] if self.channels_last else torch.contiguous_format

    def consumer_memory_format(self, x: Tensor) -> torch.memory_format:
        return CHANNELS_LAST[x.dim()] if self.keeps_channels_last else self.memory_format(x)

    def channels_read(self, i: int) -> int:
        """How many channels layer i reads."""
        return self.in_channels + self.growth_rate * i

    def channels_of(self, segment: int) -> tuple[int, int]:
        """The first channel of a segment of the features and the channel after its last: segment 0 is the stage's
        input, without those that are `SKIPPED`, and segment i + 1 the output of layer i."""
        if segment <= 0:
            first = self.in_channels - self.skip
            return (0, first) if segment == 0 else (first, self.in_channels)
        return self.channels_read(segment - 1), self.channels_read(segment)

    def segment_columns(self, segment: int) -> slice:
        """The columns of a segment in the features, and in the matrix of statistics unless their norms are frozen."""
        return self.order.slice(*self.channels_of(segment))

    @property
    def num_masks(self) -> int:
        """How many bytes a value has for the bits of dropout's masks, one for each layer."""
        return -(-len(self.layers) // PER_BYTE) if any(layer.drop_rate for layer in self.layers) else 0

    @property
    def consumer_norm(self) -> int:
        """The number of the consumer's norm; without a consumer, how many norms there are."""
        return len(self.norms) - (self.consumer is not None)

    def why_not_shapes(self, parameters: Sequence[Any], dims: int) -> str | None:
        """Why parameters of these shapes are not those that kernels read by this specification, or None.

        Attributes of modules, such as num_features and out_channels, are not asked: PyTorch does not read them either.
        """
        for (channels, width, kernel_size), tensors in zip(self.sizes, norm_convs(parameters), strict=True):
            if width is None and tensors.conv_weight is not None:
                width = tensors.conv_weight.shape[0]
            expected = (channels,), (channels,), (width, channels, *[kernel_size] * dims), (width,)
            for name, tensor, shape in zip(NormConv._fields, tensors, expected, strict=True):
                if tensor is not None and tensor.shape != shape:
                    words = name.replace("norm_", "norm's ").replace("conv_", "convolution's ")
                    return f"found a {words} of shape {tuple(tensor.shape)}, where {shape} fits what is before it"
        return None

    def check_shapes(self, parameters: Sequence[Any], dims: int) -> None:
        """Raise RuntimeError if the kernels would read other parameters than there are."""
        reason = self.why_not_shapes(parameters, dims)
        if reason is not None:
            raise RuntimeError(f"{reason}: change weights only between steps, and all that depend on one another")

    @property
    def encoded(self) -> str:
        """The specification as the string that the operators take."""
        if self._encoded is None:
            *settings, layers, consumer = (getattr(self, name) for name in _FIELDS)
            consumer = None if consumer is None else tuple(consumer)
            self._encoded = encode(*settings, tuple(map(tuple, layers)), consumer)
        return self._encoded


_FIELDS = tuple(field.name for field in fields(StageSpec))


@constant_to_compilers
def encode(*settings: Any) -> str:
    """Plain data as the string that an operator takes."""
    return json.dumps(settings)


@lru_cache(maxsize=4096)
def decode(text: str) -> StageSpec:
    """The specification whose `encoded` is `text`."""
    *settings, layers, consumer = json.loads(text)
    settings[_FIELDS.index("room")] = tuple(settings[_FIELDS.index("room")])
    layers = tuple(_decoded(LayerSpec, layer) for layer in layers)
    return StageSpec(*settings, layers=layers, consumer=None if consumer is None else _decoded(ConsumerSpec, consumer))


def _decoded(cls: Any, values: Sequence[Any]) -> Any:
    """The named tuple with these values, of which lists are activations."""
    return cls(*(ActivationSpec(*value) if isinstance(value, list) else value for value in values))


SKIPPED = -1
"""The segment of the channels that another stage has stored."""

PER_NORM = len(NormConv._fields)
"""A stage's parameters for each norm."""


class SavedStage(NamedTuple):
    """The tensors that the backward of a stage reads.

    Attributes:
        features: (pixels, channels), centered unless the norms are frozen.
        statistics: the matrix of `ForwardStatistics`.
        count: how many values of a channel the processes of the sync group have, if there is one.
        codes: as in `MaxPooled`, of a consumer with max pooling.
        bottlenecks: (pixels, width) for each layer that keeps its bottleneck.
        dropout_masks, parameters: as in `StageInputs`; masks of the layers.
    """

    features: Tensor
    statistics: Tensor
    count: Tensor | None
    codes: Any
    bottlenecks: Sequence[Tensor]
    dropout_masks: Sequence[Tensor]
    parameters: Sequence[Tensor | None]


def norm_convs(tensors: Sequence[Any]) -> list[NormConv]:
    """A stage's parameters, or one value for each of them, grouped by norm; without the place of skipped channels in
    autograd's graph, which is the last one if there are any."""
    return [NormConv(*tensors[i : i + PER_NORM]) for i in range(0, len(tensors) // PER_NORM * PER_NORM, PER_NORM)]
