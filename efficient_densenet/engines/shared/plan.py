"""The plan of a stage: the parts of a block and its consumer, and their settings on one input, read once."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from ...norms.frozen import eps_of, uses_running_statistics
from ...norms.sync_batch_norm import sync_group
from ..memory_format import memory_format_of
from ..parts import BlockParts, ConsumerParts, Norm
from ..precision import compute_dtype
from .statistics import ChannelOrder

LAYER_GROUP_BYTES = 1 << 21
"""How large the parameters of a layer group may be, if it has more than one layer."""


class LayerGroup(NamedTuple):
    """Consecutive layers of a stage whose gradients are released together, and their slice of the stage's tensors."""

    layers: range
    tensors: slice


class NormConv(NamedTuple):
    """The tensors of a norm and of the convolution after it, whose bias may be None; a norm alone has both None."""

    norm_weight: Tensor
    norm_bias: Tensor
    conv_weight: Any
    conv_bias: Tensor | None


class StagePlan:
    """The modules of a stage, layers or a consumer or both, and the slice of `tensors` with the parameters of each.

    `dtype` is that of the convolutions, `memory_format` that of the input and so of the outputs. With `return_features`
    the stage returns the block's output beside the consumer's. `order` is of the features' channels, `output_order` of
    the channels of the block's output, which may lack the block's input. `frozen` norms use their running statistics.
    Their weight and bias may require gradients all the same.
    """

    def __init__(
        self, block: BlockParts, consumer: ConsumerParts | None, x: Tensor, return_features: bool = False
    ) -> None:
        self.dtype, self.memory_format = compute_dtype(x), memory_format_of(x)
        self.layers, self.consumer = block.layers, consumer
        self.return_features = return_features
        norm = self.layers[0].norm1 if consumer is None or self.layers else consumer.norm
        self.sync_group, self.frozen, self.eps = sync_group(norm), uses_running_statistics(norm), eps_of(norm)
        self.bottleneck_frozen = [
            layer.norm2 is not None and uses_running_statistics(layer.norm2) for layer in self.layers
        ]
        self.growth_rate = self.layers[0].last_conv.out_channels if self.layers else 0
        self.order = ChannelOrder(x.shape[1] + self.growth_rate * len(self.layers), block.newest_first)
        self.output_order = self.order._replace(first=x.shape[1] if block.new_features_only else 0)
        self.tensors: list[Tensor | None] = []
        self.layer_tensors = [self._add(layer.norms, layer.convolutions) for layer in self.layers]
        if consumer is not None:
            self.consumer_tensors = self._add([consumer.norm], [] if consumer.conv is None else [consumer.conv])
        self.groups = self._layer_groups()

    def _add(self, norms: Sequence[Norm], convolutions: Sequence[_ConvNd]) -> slice:
        start = len(self.tensors)
        for norm, conv in zip_longest(norms, convolutions):
            self.tensors += [norm.weight, norm.bias, *((None, None) if conv is None else (conv.weight, conv.bias))]
        return slice(start, len(self.tensors))

    def _layer_groups(self) -> list[LayerGroup]:
        """From the first layers to the last; the last group has the consumer too."""
        firsts, size = [0], 0
        for i, tensors in enumerate(self.layer_tensors):
            own = sum(tensor.nbytes for tensor in self.tensors[tensors] if tensor is not None)
            if i > firsts[-1] and size + own > LAYER_GROUP_BYTES:
                firsts.append(i)
                size = 0
            size += own
        starts = [0, *(self.layer_tensors[first].start for first in firsts[1:])]
        nexts, stops = [*firsts[1:], len(self.layers)], [*starts[1:], len(self.tensors)]
        return list(map(LayerGroup, map(range, firsts, nexts), map(slice, starts, stops)))

    def finish(self, output: Tensor) -> Tensor:
        """What follows the consumer's convolution, such as another pooling, as ordinary autograd operations."""
        return output if self.consumer is None or self.consumer.after is None else self.consumer.after(output)


def norm_convs(tensors: Sequence[Any], of: slice) -> list[NormConv]:
    """A slice of a plan's tensors, or of values that belong to them, with one entry for each norm."""
    width = len(NormConv._fields)
    return [NormConv(*tensors[start : start + width]) for start in range(of.start, of.stop, width)]
