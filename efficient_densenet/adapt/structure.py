"""Recognize dense blocks by their structure: the classes of modules, their order and their widths, but not their
names."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._dimensions import DIMENSIONS
from ..engine.parts import block_reader

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def may_be_block(block: nn.Module, may_be_layer: bool) -> bool:
    """Whether `block` should be traced: it looks like a dense block or may be a layer that concatenates, or it has a
    single layer of one or two norms and convolutions."""
    if looks_dense(block):
        return True
    layers = [block] if may_be_layer else layers_in(block)
    counts = [(len(convolutions_in(each)), sum(map(is_any_norm, each.modules()))) for each in layers]
    return len(layers) == 1 and ((may_be_layer and counts[0][0] > 0) or counts[0] in ((1, 1), (2, 2)))


def may_be_called(block: nn.Module) -> bool:
    """Whether engines may call the forward of `block` or of its layers as they are."""
    return block_reader(block) is None and bool(convolutions_in(block))


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


def why_not_traced(block: nn.Module) -> str | None:
    """Why the forward of `block` cannot be traced, or None."""
    if "forward" in block.__dict__ or isinstance(block, torch.jit.ScriptModule):
        return "found a forward that is compiled or was set on the instance"
    for each in block.modules():
        tensors = *each._parameters.values(), *each._buffers.values()
        if any(isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) for tensor in tensors):
            return f"found a {type(each).__name__} that has not seen data yet"
    return None


def layers_in(block: nn.Module) -> list[nn.Module]:
    """The candidates for layers: the children of `block`, or of the container that is its only child."""
    children = list(block.children())
    inside = {module for child in children for module in child.modules() if module is not child}
    children = [child for child in children if child not in inside]  # a module inside another has a second name
    if len(children) == 1 and isinstance(children[0], _CONTAINERS):
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
    all_widths = list(map(_widths, layers_in(block)))
    widths = list(filter(None, all_widths))
    if len(widths) < (2 if len(widths) == len(all_widths) else 3):  # a child may be no layer
        return False
    steps = {after[0] - layer[0] for layer, after in pairwise(widths)}
    return (
        _grow_densely(widths)
        or (len(widths) > 3 and _grow_densely(widths[:-1]))  # the last may be another
        or (len(widths) > 2 and len(steps) == 1 and min(steps) > 0)
    )


def convolutions_in(module: nn.Module) -> list[Any]:
    """The convolutions inside `module`, in their order: torch's, and modules of other classes that have channels and
    parameters like one, but no modules inside."""
    return [each for each in module.modules() if isinstance(each, _ConvNd) or _is_custom_convolution(each)]


def _is_custom_convolution(module: nn.Module) -> bool:
    has_channels = all(isinstance(vars(module).get(name), int) for name in ("in_channels", "out_channels"))
    return has_channels and bool(module._parameters) and not module._modules


def _grow_densely(widths: Sequence[tuple[int, ...]]) -> bool:
    """Whether each layer reads the input and the output of the one before it. If all return as many channels as they
    read, they are branches for images of several sizes."""
    are_branches = len(widths) > 1 and all(read == written for read, written in widths)
    return not are_branches and all(sum(layer) == after[0] for layer, after in pairwise(widths))


def _widths(layer: nn.Module) -> tuple[int, ...]:
    """The channels that a layer's first convolution reads and its last convolution writes; empty without
    convolutions."""
    convolutions = convolutions_in(layer)
    if len(convolutions) == 2:
        first, second = convolutions
        if first.out_channels != second.in_channels and second.out_channels == first.in_channels:
            convolutions = [second, first]
    return (convolutions[0].in_channels, convolutions[-1].out_channels) if convolutions else ()


def is_any_norm(module: nn.Module) -> bool:
    """Whether `module` is a norm of any kind; the engines decide later which kinds they can run."""
    return isinstance(module, (_NormBase, nn.GroupNorm, nn.LayerNorm)) or "Norm" in type(module).__name__


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called: an nn.ModuleList and an nn.ModuleDict only hold modules."""
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward is not nn.Module.forward
