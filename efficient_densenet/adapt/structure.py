"""Dense blocks told from what they are made of: kinds of modules, their order and widths, never their names."""

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
    """The parts of `block`, by a reader that was registered for its class or by its structure."""
    reader = block_reader(block)
    if reader is not None:
        return reader(block)
    if "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
        raise NoPartsError("found a forward that is compiled or was set on the instance")
    parts = BlockParts(tuple(map(read_layer, layers_in(block))), newest_first)
    if not parts.layers or not _grow(parts):
        raise NoPartsError("found layers whose widths are not those of a growing concatenation")
    return parts


def layers_in(block: nn.Module) -> list[nn.Module]:
    """What would be the layers: the children of `block`, or of the only container in it."""
    children = list(block.children())
    if len(children) == 1 and isinstance(children[0], _CONTAINERS) and not _is_layer(children[0]):
        return list(children[0].children())
    return children


def looks_dense(block: nn.Module) -> bool:
    """Whether each part of `block` adds as much as the others and reads what those before it read and made, going by
    its first and last convolution; or whether `block` calls itself dense, or somebody else does."""
    if "denseblock" in type(block).__name__.lower().replace("_", "") or block_reader(block) is not None:
        return True
    ends = []
    for part in layers_in(block):
        convolutions = [module for module in part.modules() if isinstance(module, _ConvNd)]
        if not convolutions:
            return False
        ends.append((convolutions[0].in_channels, convolutions[-1].out_channels))
    grows = all(read + made == after for (read, made), (after, _) in pairwise(ends))
    return grows and len(ends) > 1 and len({made for _, made in ends}) == 1


def read_layer(layer: nn.Module) -> LayerParts:
    """Norm, activation and convolution, once or twice, and perhaps dropout."""
    norms, convolutions, activations, dropouts = [], [], [], []
    for module in _leaves(layer):
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
        names = [type(module).__name__ for module in _leaves(layer)]
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


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside that do something, each with what belongs to it."""
    for child in module.children():
        if _is_norm(child) or isinstance(child, _ConvNd) or not any(True for _ in child.children()):
            yield child
        else:
            yield from _leaves(child)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, (_NormBase, nn.GroupNorm, nn.LayerNorm)) or "Norm" in type(module).__name__


def _dropout(layer: nn.Module, module: nn.Module | None = None) -> tuple[float, Callable[[Tensor, float], Tensor]]:
    """How much a layer drops now and by which function, as its module says or an attribute of its own."""
    if module is not None:
        if type(module) not in _DROPOUTS:
            raise NoPartsError(f"found a {type(module).__name__} inside a layer")
        return (module.p if module.training else 0.0), _DROPOUTS[type(module)]
    rates = {value for name, value in vars(layer).items() if "drop" in name and type(value) is float}
    rates -= {0.0}
    if len(rates) > 1:
        raise NoPartsError(f"found a {type(layer).__name__} with several rates of dropout")
    return (rates.pop() if rates and layer.training else 0.0), F.dropout


def _is_layer(module: nn.Module) -> bool:
    try:
        read_layer(module)
    except NoPartsError:
        return False
    return True


def _grow(parts: BlockParts) -> bool:
    """Whether each layer reads all there is and adds as much as the others."""
    first = parts.layers[0]
    for i, layer in enumerate(parts.layers):
        reads = layer.conv1.in_channels == first.conv1.in_channels + i * first.last.out_channels
        inside = layer.conv2 is None or layer.conv2.in_channels == layer.conv1.out_channels
        if not (reads and inside and layer.last.out_channels == first.last.out_channels):
            return False
    return True
