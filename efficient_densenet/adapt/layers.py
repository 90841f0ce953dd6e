"""A block run layer by layer, by its parts."""

import torch
from torch import Tensor, nn

from ..engines import plain
from ..engines.eligibility import must_be_called
from ..engines.parts import BlockParts, LayerParts, activations_of
from ..engines.plain import RunFirstHalf


class FirstHalf(nn.Module):
    """Concatenation, norm, activation and first convolution, as the engines that recompute them want it."""

    def __init__(self, layer: LayerParts) -> None:
        super().__init__()
        self.norm1, self.conv1 = layer.norm1, layer.conv1
        self.relu1 = _activation(layer, 0)
        self.training = layer.module.training

    def first_half(self, *features: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))


def run_layers(block: BlockParts, x: Tensor, run_first_half: RunFirstHalf = plain.run_first_half) -> Tensor:
    """The output of a block, the first half of each layer made by `run_first_half`."""
    features = [x]
    for layer in block.layers:
        made = run_first_half(FirstHalf(layer), features)
        if layer.conv2 is not None:
            made = layer.conv2(_activation(layer, 1)(layer.norm2(made)))
        if layer.drop_rate > 0:
            made = layer.dropout(made, layer.drop_rate)
        features = [made, *features] if block.newest_first else [*features, made]
    return torch.cat(features, 1)


def are_passed_by(block: BlockParts) -> bool:
    """Whether `run_layers` would not call something that somebody watches."""
    for layer in block.layers:
        called = {*layer.norms, *layer.convolutions, *layer.activations}
        if any(must_be_called(module) and module not in called for module in layer.module.modules()):
            return True
    return False


def _activation(layer: LayerParts, i: int) -> nn.Module:
    """What stands after the norm number `i`; nothing after a norm that rectifies itself."""
    inside = [activations_of(norm) for norm in layer.norms]
    if inside[i]:
        return _NOTHING
    own = [module for module in layer.activations if not any(module in each for each in inside)]
    return own[min(i, len(own) - 1)] if own else _RELU


_NOTHING, _RELU = nn.Identity(), nn.ReLU()
