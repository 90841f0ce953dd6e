"""Run a dense block layer by layer: by the parts of its layers."""

from typing import cast

import torch
from torch import Tensor, nn

from ..engine import layerwise
from ..engine.layerwise import RunFirstHalf
from ..engine.limits import must_be_called
from ..engine.parts import BlockParts, LayerParts, activations_of
from ..kernels.activations import RELU_SPEC, module_of


class FirstHalf(nn.Module):
    """The concatenation, norm, activation and first convolution of a layer, which official and checkpoint recompute."""

    def __init__(self, layer: LayerParts) -> None:
        super().__init__()
        self.norm1, self.conv1 = layer.norm1, layer.conv1
        self.relu1 = _activation_after_norm(layer, 0)
        self.training = layer.module.training

    def first_half(self, *features: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))


def run_layers(block: BlockParts, x: Tensor, run_first_half: RunFirstHalf = layerwise.run_first_half_plain) -> Tensor:
    """The output of a block; `run_first_half` runs the first half of each layer."""
    x = unshared(x, run_first_half)

    features = [x]
    for layer in block.layers:
        output = run_first_half(FirstHalf(layer), features)
        if layer.conv2 is not None:
            norm2 = cast(nn.Module, layer.norm2)  # not None: there is a second convolution
            output = layer.conv2(_activation_after_norm(layer, 1)(norm2(output)))
        output = layer.dropout(output, layer.drop_rate) if layer.drop_rate > 0 else output
        features = [output, *features] if block.newest_first else [*features, output]
    if block.new_features_only:
        del features[-1 if block.newest_first else 0]
    return torch.cat(features, 1)


def unshared(x: Tensor, run_first_half: RunFirstHalf) -> Tensor:
    """The block's input, or a copy of it if layers are recomputed. Plain layers copy the input by concatenation, so
    that the caller may change it in place afterwards; recomputed layers must allow this too."""
    return x if run_first_half is layerwise.run_first_half_plain else x.clone()


def skips_a_hook(block: BlockParts) -> bool:
    """Whether a layer or a module inside it has a hook, or a replaced forward, but is not called by `run_layers`."""
    for layer in block.layers:
        called = {*layer.norms, *layer.convolutions, *layer.activations}
        if any(must_be_called(module) and module not in called for module in layer.module.modules()):
            return True
    return False


def _activation_after_norm(layer: LayerParts, index: int) -> nn.Module:
    """The module to apply after the layer's norm number `index`; the identity if the norm has an activation inside."""
    return _IDENTITY if activations_of(layer.norms[index]) else layer.activation(index) or module_of(RELU_SPEC)


_IDENTITY = nn.Identity()
