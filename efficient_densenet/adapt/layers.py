"""Run a dense block layer by layer, from its parts."""

from typing import cast

import torch
from torch import Tensor, nn

from ..engines import plain
from ..engines.eligibility import must_be_called
from ..engines.parts import BlockParts, LayerParts, activations_of
from ..engines.plain import RunFirstHalf


class FirstHalf(nn.Module):
    """Concatenation, norm, activation and first convolution of a layer: what the engines that recompute run again."""

    def __init__(self, layer: LayerParts) -> None:
        super().__init__()
        self.norm1, self.conv1 = layer.norm1, layer.conv1
        self.relu1 = _activation_after_norm(layer, 0)
        self.training = layer.module.training

    def first_half(self, *features: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))


def run_layers(block: BlockParts, x: Tensor, run_first_half: RunFirstHalf = plain.run_first_half) -> Tensor:
    """The output of a block; `run_first_half` runs the first half of each layer."""
    features = [x]
    for layer in block.layers:
        output = run_first_half(FirstHalf(layer), features)
        if layer.conv2 is not None:
            norm2 = cast(nn.Module, layer.norm2)  # which a layer with a second convolution has
            output = layer.conv2(_activation_after_norm(layer, 1)(norm2(output)))
        if layer.drop_rate > 0:
            output = layer.dropout(output, layer.drop_rate)
        features = [output, *features] if block.newest_first else [*features, output]
    return torch.cat(features, 1)


def skips_a_hook(block: BlockParts) -> bool:
    """Whether a module inside a layer has a hook, or a replaced forward, but is not called by `run_layers`."""
    for layer in block.layers:
        called = {*layer.norms, *layer.convolutions, *layer.activations}
        if any(must_be_called(module) and module not in called for module in layer.module.modules()):
            return True
    return False


def _activation_after_norm(layer: LayerParts, index: int) -> nn.Module:
    """The module to apply after the layer's norm number `index`; the identity if the norm has an activation inside."""
    fused = [activations_of(norm) for norm in layer.norms]
    if fused[index]:
        return _IDENTITY
    separate = [module for module in layer.activations if not any(module in activations for activations in fused)]
    return separate[min(index, len(separate) - 1)] if separate else _RELU


_IDENTITY, _RELU = nn.Identity(), nn.ReLU()
