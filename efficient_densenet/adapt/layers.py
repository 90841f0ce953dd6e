"""Run a dense block layer by layer: by the parts of its layers."""

import torch
from torch import Tensor, nn

from ..engine import layerwise
from ..engine.layerwise import RunFirstHalf
from ..engine.limits import must_be_called
from ..engine.parts import BlockParts, LayerParts, activations_of
from ..kernels.activations import RELU_SPEC, module_of


class PartsOfLayer(nn.Module):
    """A whole layer by its parts, from the concatenation to dropout, which official and checkpoint recompute."""

    def __init__(self, layer: LayerParts) -> None:
        super().__init__()
        self.norm1, self.modules_in_order = layer.norm1, nn.ModuleList()
        for i, (norm, conv) in enumerate(zip(layer.norms, layer.convolutions, strict=True)):
            has_activation = bool(activations_of(norm))
            activation = nn.Identity() if has_activation else layer.activation(i) or module_of(RELU_SPEC)
            self.modules_in_order.extend((norm, activation, conv))
        self.drop_rate, self.dropout, self.training = layer.drop_rate, layer.dropout, layer.module.training

    def first_half(self, *features: Tensor) -> Tensor:
        output = torch.cat(features, 1)
        for module in self.modules_in_order:
            output = module(output)
        return self.dropout(output, self.drop_rate) if self.drop_rate > 0 else output


def run_layers(block: BlockParts, x: Tensor, run_first_half: RunFirstHalf = layerwise.run_first_half_plain) -> Tensor:
    """The output of a block, each layer run by `run_first_half`."""
    features = [unshared(x, run_first_half)]
    for layer in block.layers:
        output = run_first_half(PartsOfLayer(layer), features)
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
