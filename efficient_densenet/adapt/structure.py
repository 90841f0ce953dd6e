"""Recognize dense blocks by their structure: the classes of modules, their order and their widths, but not their
names."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from .._dimensions import DIMENSIONS
from ..engine.parts import BlockParts, NoPartsError, block_reader
from .layer_parts import (
    Call,
    ConnectionPattern,
    LayerCall,
    calls_of_layers,
    check_structure,
    in_order_of_use,
    is_dense_layer,
    is_lazy,
    read_layer,
)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def patterns_by_parts(block: nn.Module, may_be_layer: bool) -> list[ConnectionPattern]:
    """The ways to read `block`, of which a trace chooses one; `NoPartsError` if there is none."""
    if block_reader(block) is not None:  # the reader knows the pattern
        parts = read_block(block, ConnectionPattern())
        return [ConnectionPattern(parts.newest_first, parts.new_features_only)]
    kinds = [ConnectionPattern()]
    if len(layers_in(block)) > 1:  # otherwise any norm-activation-convolution would be a block
        kinds.append(ConnectionPattern(new_features_only=True))
    if may_be_layer:
        kinds.append(ConnectionPattern(is_layer=True))
    possible = [kind for kind in kinds if _why_not(block, kind) is None]
    if not possible:
        raise NoPartsError(_why_not(block, kinds[0] if looks_dense(block) else kinds[-1]))
    return [replace(kind, newest_first=newest_first) for kind in possible for newest_first in (False, True)]


def _why_not(block: nn.Module, pattern: ConnectionPattern) -> str | None:
    """Why a forward of `block` cannot use its layers by `pattern`, whatever it calls; or None."""
    if _is_compiled(block):
        return "found a forward that is compiled or was set on the instance"
    try:
        _check_widths(list(map(check_structure, layers_of(block, pattern))))
    except NoPartsError as reason:
        return str(reason)
    return None


def with_calls(block: nn.Module, pattern: ConnectionPattern, runs: Sequence[Sequence[Call]]) -> ConnectionPattern:
    """The pattern with what each layer calls, of all calls of the block's forward in each of `runs`; `NoPartsError` if
    they are not those of dense layers."""
    if block_reader(block) is not None:
        return pattern
    pattern = replace(pattern, calls=calls_of_layers(block, layers_of(block, pattern), runs))
    _check_widths([list(layer.convolutions) for layer in read_block(block, pattern).layers])
    return pattern


def patterns_by_calls(block: nn.Module, is_dense: bool, may_be_layer: bool) -> list[ConnectionPattern]:
    """The ways to call whole layers: the layers of `block`, if it may be a dense block, or `block` as a layer."""
    patterns = []
    if not may_be_called(block):
        return patterns
    if is_dense and layers_in(block):
        for call in LayerCall(), LayerCall(returns_input=True), LayerCall(separately=True), LayerCall(as_list=True):
            patterns += [ConnectionPattern(new_features_only=new, layer_call=call) for new in (False, True)]
    if may_be_layer:
        patterns.append(ConnectionPattern(is_layer=True, layer_call=LayerCall(returns_input=True)))
    return [replace(pattern, newest_first=newest_first) for pattern in patterns for newest_first in (False, True)]


def may_be_called(block: nn.Module) -> bool:
    """Whether engines may call the forward of `block` or of its layers as they are."""
    tensors = [*block.parameters(), *block.buffers()]
    is_read_otherwise = block_reader(block) is not None or _is_compiled(block)
    return not is_read_otherwise and bool(convolutions_in(block)) and not any(map(is_lazy, tensors))


def layers_in_a_row(module: nn.Module) -> set[nn.Module]:
    """The modules of an nn.Sequential that may be concatenating layers: any three whose input channels grow by equal
    steps."""
    if type(module).forward is not nn.Sequential.forward:
        return set()
    children = [(child, _widths(child)[:1]) for child in module.children()]
    layers: set[nn.Module] = set()
    for (first, a), (second, b), (third, c) in zip(children, children[1:], children[2:], strict=False):
        if a and b and c and 0 < b[0] - a[0] == c[0] - b[0]:
            layers |= {first, second, third}
    return layers


def read_block(block: nn.Module, pattern: ConnectionPattern) -> BlockParts:
    """The current parts of `block`, from the reader that was registered for its class, or of the modules that its
    forward has called."""
    reader = block_reader(block)
    if reader is not None:
        return reader(block)
    layers = zip(layers_of(block, pattern), pattern.calls, strict=True)
    parts = tuple(read_layer(block, layer, calls) for layer, calls in layers)
    return BlockParts(parts, pattern.newest_first, pattern.new_features_only)


def layers_of(block: nn.Module, pattern: ConnectionPattern) -> list[nn.Module]:
    return [block] if pattern.is_layer else layers_in(block)


def _is_compiled(block: nn.Module) -> bool:
    return "forward" in block.__dict__ or isinstance(block, torch.jit.ScriptModule)


def layers_in(block: nn.Module) -> list[nn.Module]:
    """The candidates for layers: the children of `block`, or of the container that is its only child."""
    children = list(block.children())
    inside = {module for child in children for module in child.modules() if module is not child}
    children = [child for child in children if child not in inside]  # a module inside another has a second name
    if len(children) == 1 and isinstance(children[0], _CONTAINERS) and not is_dense_layer(children[0]):
        return list(children[0].children())
    return children


def channels_read(block: nn.Module) -> int:
    """The channels that a block may read: those of the first convolution of its first layer."""
    return next(widths[0] for widths in map(_widths, [*layers_in(block), block]) if widths)


def count_layers(block: nn.Module) -> int:
    """The number of layers of a block, those of its children that have convolutions."""
    return sum(map(bool, map(_widths, layers_in(block))))


def first_conv(module: nn.Module) -> Any:
    """The first convolution inside `module`."""
    return convolutions_in(module)[0]


def dimensions(module: nn.Module) -> int:
    """The dimensions of the images that `module` takes: those of its first convolution if that is torch's, otherwise
    of a batch norm."""
    conv = first_conv(module)
    if isinstance(conv, _ConvNd):
        return len(conv.kernel_size)
    of_norms = (
        dims for each in module.modules() for dims in DIMENSIONS if isinstance(each, DIMENSIONS[dims].BatchNorm)
    )
    return next(of_norms, max(each.dim() for each in conv.parameters()) - 2)


def looks_dense(block: nn.Module) -> bool:
    """Whether `block` looks like a dense block, so that the report should mention it.

    It does if its class is named "DenseBlock" or has a registered reader, or if the first and last convolutions of its
    layers have the widths of a growing concatenation.
    """
    if "denseblock" in type(block).__name__.lower().replace("_", "") or block_reader(block) is not None:
        return True
    return _look_dense(list(map(_widths, layers_in(block))))


def convolutions_in(module: nn.Module) -> list[Any]:
    """The convolutions inside `module`, in their order: torch's, and modules of other classes that have channels and
    parameters like one, but no modules inside."""
    return [each for each in module.modules() if isinstance(each, _ConvNd) or _is_custom_convolution(each)]


def _is_custom_convolution(module: nn.Module) -> bool:
    has_channels = all(isinstance(vars(module).get(name), int) for name in ("in_channels", "out_channels"))
    return has_channels and bool(module._parameters) and not module._modules


def _look_dense(all_widths: Sequence[tuple[int, ...]]) -> bool:
    widths = list(filter(None, all_widths))
    if len(widths) < (2 if len(widths) == len(all_widths) else 3):  # a child may be no layer
        return False
    steps = {after[0] - layer[0] for layer, after in pairwise(widths)}
    return (
        _grow_densely(widths)
        or (len(widths) > 3 and _grow_densely(widths[:-1]))  # the last may be another
        or (len(widths) > 2 and len(steps) == 1 and min(steps) > 0)
    )


def _grow_densely(widths: Sequence[tuple[int, ...]]) -> bool:
    """Whether each layer reads the input and the output of the one before it. If all return as many channels as they
    read, they are branches for images of several sizes."""
    are_branches = len(widths) > 1 and all(read == written for read, written in widths)
    return not are_branches and all(sum(layer) == after[0] for layer, after in pairwise(widths))


def _widths(layer: nn.Module) -> tuple[int, ...]:
    """The channels that a layer's first convolution reads and its last convolution writes; empty without
    convolutions."""
    convolutions = in_order_of_use(convolutions_in(layer))
    return (convolutions[0].in_channels, convolutions[-1].out_channels) if convolutions else ()


def _check_widths(layers: Sequence[Sequence[_ConvNd]]) -> None:
    """Raise `NoPartsError` unless the convolutions of each layer read the block's input and all earlier outputs, which
    have equal widths."""
    if not layers:
        raise NoPartsError("found no layers")
    growth_rates = [layer[-1].out_channels for layer in layers]
    if len(set(growth_rates)) > 1:
        raise NoPartsError(f"found layers that add {_enumerated(growth_rates)} channels, where all must add the same")
    first = layers[0][0].in_channels
    for i, layer in enumerate(layers):
        expected, channels = first + i * growth_rates[0], layer[0].in_channels
        if channels != expected:
            raise NoPartsError(
                f"found {channels} input channels in layer {i + 1}, where a growing concatenation has {expected}: "
                f"{first} of the block's input and {growth_rates[0]} of each layer before it"
            )
        for before, conv in pairwise(layer):
            if conv.in_channels != before.out_channels:
                raise NoPartsError(
                    f"found a convolution to {before.out_channels} channels before one from {conv.in_channels} in "
                    f"layer {i + 1}"
                )


def _enumerated(values: Sequence[int]) -> str:
    """Distinct values in the order of their first appearance, such as "4, 8"."""
    return ", ".join(map(str, dict.fromkeys(values)))
