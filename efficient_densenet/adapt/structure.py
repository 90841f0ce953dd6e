"""Recognize dense blocks by their structure: the classes of modules, their order and their widths, but no names."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from ..engines.parts import BlockParts, LayerParts, NoPartsError, activations_of, block_reader

_DROPOUTS = {
    nn.Dropout: F.dropout,
    nn.Dropout1d: F.dropout1d,
    nn.Dropout2d: F.dropout2d,
    nn.Dropout3d: F.dropout3d,
}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def read_block(block: nn.Module, newest_first: bool = False) -> BlockParts:
    """The parts of `block`, from the reader that was registered for its class or else from its structure.

    Args:
        block: a module that may be a dense block; `NoPartsError` is raised if it is not.
        newest_first: the channel order, which structure does not show and a registered reader knows by itself.
    """
    reader = block_reader(block)
    if reader is not None:
        return reader(block)
    if "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
        raise NoPartsError("found a forward that is compiled or was set on the instance")
    parts = BlockParts(tuple(map(read_layer, layers_in(block))), newest_first)
    if not parts.layers or not _has_dense_widths(parts):
        raise NoPartsError("found layers whose widths are not those of a growing concatenation")
    return parts


def layers_in(block: nn.Module) -> list[nn.Module]:
    """The candidates for layers: the children of `block`, or those of a container that is its only child."""
    children = list(block.children())
    if len(children) == 1 and isinstance(children[0], _CONTAINERS) and not _is_dense_layer(children[0]):
        return list(children[0].children())
    return children


def looks_dense(block: nn.Module) -> bool:
    """Whether `block` looks like a dense block, so that the report should mention it.

    It does if its class is called so or has a registered reader, or if its layers have the widths of a growing
    concatenation, judged by the first and the last convolution in each.
    """
    if "denseblock" in type(block).__name__.lower().replace("_", "") or block_reader(block) is not None:
        return True
    widths = []
    for layer in layers_in(block):
        convolutions = [module for module in layer.modules() if isinstance(module, _ConvNd)]
        if not convolutions:
            return False
        widths.append((convolutions[0].in_channels, convolutions[-1].out_channels))
    grows = all(inputs + outputs == next_inputs for (inputs, outputs), (next_inputs, _) in pairwise(widths))
    return grows and len(widths) > 1 and len({outputs for _, outputs in widths}) == 1


def read_layer(layer: nn.Module) -> LayerParts:
    """The parts of a layer: norm, activation and convolution, once or twice, and perhaps dropout."""
    norms, convolutions, activations, dropouts = [], [], [], []
    for module in _leaf_modules(layer):
        if any(is_lazy(parameter) for parameter in module.parameters()):
            raise NoPartsError(f"found a {type(module).__name__} that has not seen data yet")
        if _is_norm(module):
            norms.append(module)
        elif isinstance(module, _ConvNd):
            convolutions.append(module)
        elif isinstance(module, _DropoutNd):
            dropouts.append(module)
        elif not isinstance(module, nn.Identity):
            activations.append(module)
    if not (1 <= len(norms) == len(convolutions) <= 2 and len(activations) <= len(norms) and len(dropouts) <= 1):
        names = [type(module).__name__ for module in _leaf_modules(layer)]
        names = ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
        raise NoPartsError(
            f"found a {type(layer).__name__} of {names}, where a dense layer is norm, activation and convolution, "
            "once or twice, and perhaps dropout"
        )
    drop_rate, dropout = _dropout(layer, *dropouts)
    (norm1, *norm2), (conv1, *conv2) = norms, convolutions
    fused = [module for norm in norms for module in activations_of(norm)]
    return LayerParts(
        layer,
        *(norm1, conv1, *norm2, *conv2),
        activations=(*fused, *activations),
        drop_rate=drop_rate,
        dropout=dropout,
        keep_bottleneck=bool(getattr(layer, "keep_bottleneck", False)),
    )


def _leaf_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside `module` without children, and the norms and convolutions with theirs."""
    for child in module.children():
        if _is_norm(child) or isinstance(child, _ConvNd) or not any(True for _ in child.children()):
            yield child
        else:
            yield from _leaf_modules(child)


def _is_norm(module: nn.Module) -> bool:
    """Whether `module` is a norm of any kind; the engines decide later which kinds they can run."""
    return isinstance(module, (_NormBase, nn.GroupNorm, nn.LayerNorm)) or "Norm" in type(module).__name__


def _dropout(layer: nn.Module, module: _DropoutNd | None = None) -> tuple[float, Callable[[Tensor, float], Tensor]]:
    """The current drop rate of a layer and its dropout function, from its dropout module or else its attributes."""
    if module is not None:
        if type(module) not in _DROPOUTS:
            raise NoPartsError(f"found a {type(module).__name__} inside a layer")
        return (module.p if module.training else 0.0), _DROPOUTS[type(module)]
    rates = {value for name, value in vars(layer).items() if "drop" in name and type(value) is float}
    rates -= {0.0}
    if len(rates) > 1:
        raise NoPartsError(f"found a {type(layer).__name__} with several rates of dropout")
    return (rates.pop() if rates and layer.training else 0.0), F.dropout


def _is_dense_layer(module: nn.Module) -> bool:
    try:
        read_layer(module)
    except NoPartsError:
        return False
    return True


def _has_dense_widths(parts: BlockParts) -> bool:
    """Whether each layer reads the block's input and all earlier outputs, and all outputs have the same width."""
    first = parts.layers[0]
    growth_rate = first.last_conv.out_channels
    for i, layer in enumerate(parts.layers):
        reads_all = layer.conv1.in_channels == first.conv1.in_channels + i * growth_rate
        bottleneck_fits = layer.conv2 is None or layer.conv2.in_channels == layer.conv1.out_channels
        if not (reads_all and bottleneck_fits and layer.last_conv.out_channels == growth_rate):
            return False
    return True
