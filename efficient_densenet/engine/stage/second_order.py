"""A stage by plain functions, which autograd can differentiate any number of times.

Under `create_graph=True` the backward of a stage runs it again by these functions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._dimensions import dimensions_of
from ...kernels.interface import INV_STD, MEAN
from ...kernels.portable import halved, to_pixel_matrix, to_spatial
from ..operator import Connected
from .masks import bits, scale
from .max_pooled import at_codes
from .spec import SKIPPED, ConsumerSpec, SavedStage, StageSpec, norm_convs


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, statistics: Tensor | None) -> Tensor:
    """A norm with batch statistics or, if `statistics` is not None, with these rows of statistics."""
    if statistics is None:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    shape = -1, *[1] * (x.dim() - 2)
    scale = (weight * statistics[INV_STD]).view(shape)
    return ((x - statistics[MEAN].view(shape)) * scale + bias.view(shape)).to(x.dtype)


class PlainStage:
    """The outputs of a stage, by functions that autograd can differentiate any number of times."""

    def __init__(self, spec: StageSpec, saved: SavedStage, parameters: Sequence[Tensor | None]) -> None:
        self.spec, self.saved, self.tensors = spec, saved, norm_convs(parameters)
        self.edge = parameters[-1]

    def run(self, x: Tensor) -> list[Tensor]:
        features = [x]
        if self.spec.skip:
            values = self.spec.values(self.saved.features, self.saved.statistics, self.spec.segment_columns(SKIPPED))
            features.append(to_spatial(Connected.apply(self.edge, values), torch.Size([x.shape[0], *x.shape[2:]])))
        for i in range(len(self.spec.layers)):
            new = self._layer(i, self._concatenated(features))
            features.append(new.to(x.dtype))
        outputs = []
        if self.spec.consumer is not None:
            outputs.append(self._consumer(self.spec.consumer, self._concatenated(features)))
        if self.spec.returns_features:
            new = features[1 + bool(self.spec.skip) :]
            output = self._concatenated(new if self.spec.new_features_only else features)
            outputs.append(to_pixel_matrix(output) if self.spec.room else output)
        return outputs

    def _concatenated(self, features: list[Tensor]) -> Tensor:
        return torch.cat(features[::-1] if self.spec.newest_first else features, 1)

    def _layer(self, i: int, x: Tensor) -> Tensor:
        layer = self.spec.layers[i]
        number = self.spec.layer_norms[i].start
        tensors = self.tensors[number]
        x = self._norm(x, number, self.spec.eps)
        if layer.width:
            x = layer.activation1.forward(x)
            x = self._convolve(x, tensors.conv_weight, tensors.conv_bias, 1)
            if layer.norm2_frozen and tensors.conv_bias is not None:  # the saved mean lacks this bias
                x = x - tensors.conv_bias.detach().to(x.dtype).view(-1, *[1] * (x.dim() - 2))
            tensors = self.tensors[number + 1]
            x = self._norm(x, number + 1, layer.norm2_eps)
        x = (layer.activation2 if layer.width else layer.activation1).forward(x)
        x = self._convolve(x, tensors.conv_weight, tensors.conv_bias, layer.dilation)
        if layer.drop_rate:
            kept, bit = bits(self.saved.dropout_masks, i)
            x = x * to_spatial(kept, torch.Size([len(x), *x.shape[2:]])) * (scale(layer.drop_rate) / bit)
        return x

    def _consumer(self, consumer: ConsumerSpec, x: Tensor) -> Tensor:
        number = self.spec.consumer_norm
        tensors = self.tensors[number]
        x = self._norm(x, number, self.spec.eps) if consumer.has_norm else x
        if not consumer.has_conv:
            return x
        x = consumer.activation.forward(x) if consumer.has_norm else x
        x = self._convolve(x, tensors.conv_weight, tensors.conv_bias, 1)
        if consumer.max_pools:
            codes = to_spatial(self.saved.codes, halved(torch.Size([x.shape[0], *x.shape[2:]])))
            return at_codes(x, codes) * scale(consumer.drop_rate)
        return dimensions_of(x).avg_pool(x, 2) if consumer.pools else x

    def _norm(self, x: Tensor, number: int, eps: float) -> Tensor:
        """Norm `number`, with batch statistics or, if it is frozen, with its saved statistics."""
        norm, tensors = self.spec.norms[number], self.tensors[number]
        statistics = self.saved.statistics[:, norm.columns] if norm.frozen else None
        return plain_norm(x, tensors.norm_weight, tensors.norm_bias, eps, statistics)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        dtype, padding = self.spec.torch_dtype, weight.shape[2] // 2 * dilation
        bias = None if bias is None else bias.to(dtype)
        return dimensions_of(x).conv(x.to(dtype), weight.to(dtype), bias, padding=padding, dilation=dilation)
