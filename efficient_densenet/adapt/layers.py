"""Run a dense block layer by layer: by the parts of its layers, or by calling whole layers."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..engine import layerwise
from ..engine.changed_modules import must_be_called
from ..engine.layerwise import RunFirstHalf
from ..engine.parts import BlockParts, LayerParts, activations_of
from ..kernels.activations import RELU_SPEC, module_of
from .fingerprint import change_since, fingerprint
from .known import class_as_written
from .layer_parts import ConnectionPattern, LayerCall
from .structure import layers_in

AnyLayer = TypeVar("AnyLayer")


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

    def run(layer: LayerParts, features: list[Tensor]) -> Tensor:
        output = run_first_half(FirstHalf(layer), features)
        if layer.conv2 is not None:
            norm2 = cast(nn.Module, layer.norm2)  # not None: there is a second convolution
            output = layer.conv2(_activation_after_norm(layer, 1)(norm2(output)))
        return layer.dropout(output, layer.drop_rate) if layer.drop_rate > 0 else output

    return _grow(block.layers, run, x, block.newest_first, block.new_features_only)


class WholeLayer(nn.Module):
    """The concatenation and a whole layer of any kind, which official and checkpoint recompute."""

    def __init__(self, layer: nn.Module, forward: Callable, call: LayerCall, newest_first: bool) -> None:
        super().__init__()
        self.layer, self.run, self.call, self.newest_first = layer, unchanged(layer, forward), call, newest_first
        self.norm1 = _IDENTITY  # the block has put the norms inside under the exactly-once rule
        self.training = layer.training

    def first_half(self, *features: Tensor) -> Tensor:
        if self.call.separately:
            return self.run(*features)
        if self.call.as_list:
            return self.run(list(features))
        x = torch.cat(features, 1)
        output = self.run(x)
        if not self.call.returns_input:
            return output
        new = output.shape[1] - x.shape[1]
        # A copy, since a view would keep the input alive.
        return (output[:, :new] if self.newest_first else output[:, -new:]).clone()


def unchanged(module: nn.Module, forward: Callable) -> Callable:
    """A `forward` of `module` for recomputation, which must read the same values again."""
    if torch.compiler.is_compiling():  # a compiler recomputes with the values of the forward
        return forward
    state, tensors = fingerprint(module), _tensors(module)

    def run(*args: Any) -> Any:
        are_same = all(now is before for now, before in zip(_tensors(module), tensors, strict=False))
        change = change_since(state, module) or (None if are_same else "a tensor was replaced")
        if change is not None:
            raise RuntimeError(
                f"found that {change} between the forward of a {class_as_written(module).__name__} and its backward, "
                "which recomputes it: change it after the backward"
            )
        return forward(*args)

    return run


def _tensors(module: nn.Module) -> list[Tensor]:
    """The tensors that modules hold as attributes, besides parameters and buffers."""
    return [value for each in module.modules() for value in vars(each).values() if isinstance(value, Tensor)]


def run_whole_layers(
    block: nn.Module,
    forward: Callable[[Tensor], Tensor],
    pattern: ConnectionPattern,
    x: Tensor,
    run_first_half: RunFirstHalf = layerwise.run_first_half_plain,
) -> Tensor:
    """The output of a block whose layers are called whole, each by `run_first_half`.

    `forward` is the author's forward, for a block that is itself the layer.
    """
    call, x = cast(LayerCall, pattern.layer_call), unshared(x, run_first_half)
    layers = [block] if pattern.is_layer else layers_in(block)

    def run(layer: nn.Module, features: list[Tensor]) -> Tensor:
        called = forward if pattern.is_layer else layer
        return run_first_half(WholeLayer(layer, called, call, pattern.newest_first), features)

    return _grow(layers, run, x, pattern.newest_first, pattern.new_features_only)


def unshared(x: Tensor, run_first_half: RunFirstHalf) -> Tensor:
    """The block's input, or a copy of it if layers are recomputed. Plain layers copy the input by concatenation, so
    that the caller may change it in place afterwards; recomputed layers must allow this too."""
    return x if run_first_half is layerwise.run_first_half_plain else x.clone()


def _grow(
    layers: Iterable[AnyLayer],
    run: Callable[[AnyLayer, list[Tensor]], Tensor],
    x: Tensor,
    newest_first: bool,
    new_features_only: bool,
) -> Tensor:
    """The concatenation of all outputs: each layer runs on the block's input and all outputs so far."""
    features = [x]
    for layer in layers:
        output = run(layer, features)
        features = [output, *features] if newest_first else [*features, output]
    if new_features_only:
        del features[-1 if newest_first else 0]
    return torch.cat(features, 1)


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
