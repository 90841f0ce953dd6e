"""How a block's forward uses its layers, and the parts of a dense layer: the modules and functions that its forward has
called in a trace."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._dimensions import classes, dimensions_of
from ..engine.parts import LayerParts, NoPartsError, activations_of
from ..kernels.activations import ActivationSpec, module_of
from .code import Code

Path = tuple[str, ...]
"""The names that lead from a block to a module inside."""

Call = nn.Module | ActivationSpec | str
"""A module that a forward has called; or the settings of an activation, or the name of another function, that its
author's code has called."""

DENSE_LAYER, TRANSITION = "(na?c){1,2}d?", "na?c[dp]{0,2}"
"""The calls of a forward, a letter each: norm, activation, convolution, dropout, pooling."""

POOLS = (*classes("AvgPool"), *classes("MaxPool"))
POOL_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool": lambda x: dimensions_of(x).avg_pool(x, 2),
    "max_pool": lambda x: dimensions_of(x).max_pool(x, 2),
}
_DROPOUTS = {
    nn.Dropout.forward: F.dropout,
    nn.Dropout1d.forward: F.dropout1d,
    nn.Dropout2d.forward: F.dropout2d,
    nn.Dropout3d.forward: F.dropout3d,
}
_NO_ACTIVATION = ActivationSpec("identity")


class LayerCalls(NamedTuple):
    """What the forward of a layer calls.

    Attributes:
        norms, convolutions: the first and perhaps the second.
        activations: the activation after each norm: a module, or the settings of a function.
        after: the dropout and, in a transition, the pooling after the last convolution: modules, or names in
            `POOL_FUNCTIONS`.
        drop_rate: the name of the attribute of the layer that is the rate of a dropout by a function; "" without.
    """

    norms: tuple[Path, ...]
    convolutions: tuple[Path, ...]
    activations: tuple[Path | ActivationSpec, ...]
    after: tuple[Path | str, ...] = ()
    drop_rate: str = ""


class LayerCall(NamedTuple):
    """How to call a layer whole.

    Attributes:
        separately: True to pass the features as arguments, `layer(*features)`, False to pass their concatenation.
        returns_input: True if the layer returns the concatenation of its input and output, in the block's order.
        as_list: True to pass the features as one list, `layer(features)`.
    """

    separately: bool = False
    returns_input: bool = False
    as_list: bool = False


@dataclass(frozen=True)
class ConnectionPattern:
    """How a block's forward uses its layers.

    Attributes:
        newest_first, new_features_only: as in `BlockParts`.
        is_layer: True for a single layer that concatenates its input and its output, and so is a block by itself.
        layer_call: how to call whole layers, if their parts do not describe them; None if they do.
        calls: what each layer calls, where the parts of the layers describe them.
    """

    newest_first: bool = False
    new_features_only: bool = False
    is_layer: bool = False
    layer_call: LayerCall | None = None
    calls: tuple[LayerCalls, ...] = ()


WHOLE = ConnectionPattern(is_layer=True, layer_call=LayerCall())
"""A block that is recomputed as a whole, since its layers are not those of a growing concatenation."""


def calls_of_layers(
    block: nn.Module, layers: Sequence[nn.Module], runs: Iterable[Sequence[Call]], kind: str = DENSE_LAYER
) -> tuple[LayerCalls, ...]:
    """The calls of each of `layers`; `NoPartsError` if they are others than those of a layer of this kind.

    `runs` are all calls of the block's forward, in several modes. They must be the same, except that a dropout may be
    called in some modes only.
    """
    in_modes = [_calls_of_layers(block, layers, calls, kind) for calls in runs]
    most = max(in_modes, key=lambda in_mode: sum(len(calls.after) for calls in in_mode))
    for in_mode in in_modes:
        for layer, calls, expected in zip(layers, in_mode, most, strict=True):
            if calls._replace(after=expected.after) != expected or not set(calls.after) <= set(expected.after):
                raise NoPartsError(f"found a {type(layer).__name__} that calls other modules in some modes")
    return tuple(most)


def _calls_of_layers(
    block: nn.Module, layers: Sequence[nn.Module], calls: Iterable[Call], kind: str
) -> list[LayerCalls]:
    inside, of_layers, i = [set(layer.modules()) for layer in layers], [list[Call]() for _ in layers], 0
    for call in calls:
        if call not in inside[i] and i + 1 < len(layers) and call in inside[i + 1]:
            i += 1
        if not isinstance(call, nn.Identity):
            of_layers[i].append(call)
    names = {module: tuple(name.split(".")) for name, module in block.named_modules()}
    return [_layer_calls(names, *each, kind) for each in zip(layers, of_layers, strict=True)]


def _layer_calls(names: dict[nn.Module, Path], layer: nn.Module, calls: Sequence[Call], kind: str) -> LayerCalls:
    kinds = "".join(map(_kind, calls))
    if not re.fullmatch(kind, kinds):
        raise _error(layer, "that calls", calls)
    places: list[Any] = [names[call] if isinstance(call, nn.Module) else call for call in calls]
    norms, convolutions = ([i for i, each in enumerate(kinds) if each == letter] for letter in "nc")
    return LayerCalls(
        tuple(places[i] for i in norms),
        tuple(places[i] for i in convolutions),
        tuple(places[i + 1] if kinds[i + 1] == "a" else _NO_ACTIVATION for i in norms),
        tuple(places[convolutions[-1] + 1 :]),
        _drop_rate(layer),
    )


def _kind(call: Call) -> str:
    if isinstance(call, (ActivationSpec, str)):
        return "a" if isinstance(call, ActivationSpec) else "p" if call in POOL_FUNCTIONS else "?"
    if is_any_norm(call):
        return "n"
    return next((kind for kind, cls in (("c", _ConvNd), ("d", _DropoutNd), ("p", POOLS)) if isinstance(call, cls)), "a")


def is_any_norm(module: nn.Module) -> bool:
    """Whether `module` is a norm of any kind; the engines decide later which kinds they can run."""
    return isinstance(module, (_NormBase, nn.GroupNorm, nn.LayerNorm)) or "Norm" in type(module).__name__


def _error(layer: nn.Module, verb: str, parts: Sequence[Call]) -> NoPartsError:
    names = [type(part).__name__ if isinstance(part, nn.Module) else getattr(part, "name", part) for part in parts]
    listed = ", ".join(map(str, names[:8])) + (", …" if len(names) > 8 else "")
    found = f"{type(layer).__name__} {verb} {listed}" if listed else type(layer).__name__
    return NoPartsError(
        f"found a {found}, where a dense layer is norm, activation and convolution, once or twice, and perhaps dropout "
        "after the last convolution"
    )


def read_layer(block: nn.Module, layer: nn.Module, calls: LayerCalls) -> LayerParts:
    """The current parts of a layer of `block`."""
    norms, convolutions = ([submodule(block, path) for path in paths] for paths in (calls.norms, calls.convolutions))
    activations = []
    for norm, place in zip(norms, calls.activations, strict=True):
        inside = activations_of(norm)
        if len(inside) > 1:
            raise NoPartsError(f"found a {type(norm).__name__} with several activations")
        separate = module_of(place) if isinstance(place, ActivationSpec) else submodule(block, place)
        activations.append(inside[0] if inside else separate)
    (norm1, *norm2), (conv1, *conv2) = norms, convolutions
    drop_rate, dropout = _dropout(block, layer, calls)
    return LayerParts(
        layer,
        *(norm1, conv1, *norm2, *conv2),
        activations=tuple(activations),
        drop_rate=drop_rate,
        dropout=dropout,
        keep_bottleneck=getattr(layer, "keep_bottleneck", None),
    )


def submodule(block: nn.Module, path: Path) -> Any:
    module: Any = block
    for name in path:
        module = module._modules[name]
    return module


def _dropout(block: nn.Module, layer: nn.Module, calls: LayerCalls) -> tuple[float, Callable[[Tensor, float], Tensor]]:
    """The current drop rate of a layer, from the dropout module that it calls or else its attribute, and its dropout
    function."""
    for place in calls.after:
        module = None if isinstance(place, str) else submodule(block, place)
        if isinstance(module, _DropoutNd):
            dropout = _DROPOUTS.get(type(module).forward)
            if dropout is None:
                raise NoPartsError(f"found a {type(module).__name__} inside a layer, with a forward of its own")
            return (module.p if module.training else 0.0), dropout
    return (getattr(layer, calls.drop_rate) if calls.drop_rate and layer.training else 0.0), F.dropout


def _drop_rate(layer: nn.Module) -> str:
    """The name of the only attribute of a layer that may be a rate of dropout and is not zero; "" without."""
    names = [name for name in Code([layer]).names if "drop" in name]
    rates = [name for name in names if type(value := getattr(layer, name, None)) is float and value]
    return rates[0] if len(rates) == 1 else ""


def check_structure(layer: nn.Module) -> list[_ConvNd]:
    """The convolutions of a layer, in the order of their use; `NoPartsError` if it cannot be dense."""
    leaves = list(leaf_modules(layer))
    lazy = next((leaf for leaf in leaves if any(map(is_lazy, leaf.parameters()))), None)
    if lazy is not None:
        raise NoPartsError(f"found a {type(lazy).__name__} that has not seen data yet")
    convolutions = [leaf for leaf in leaves if isinstance(leaf, _ConvNd)]
    if not 1 <= sum(map(is_any_norm, leaves)) == len(convolutions) <= 2:
        raise _error(layer, "of", leaves)
    return in_order_of_use(convolutions)


def in_order_of_use(convolutions: list[Any]) -> list[Any]:
    """Convolutions in the order of their use, as far as the widths of two show it, or else of their registration."""
    if len(convolutions) == 2:
        first, second = convolutions
        if first.out_channels != second.in_channels and second.out_channels == first.in_channels:
            return [second, first]
    return convolutions


def leaf_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside `module` that have no children, or that are norms or convolutions."""
    for child in module.children():
        if is_any_norm(child) or isinstance(child, _ConvNd) or not any(True for _ in child.children()):
            yield child
        else:
            yield from leaf_modules(child)


def is_dense_layer(module: nn.Module) -> bool:
    """Whether `module` may be a dense layer, by the modules inside."""
    if not has_forward(module):
        return False
    try:
        check_structure(module)
    except NoPartsError:
        return False
    return True


def is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, (UninitializedParameter, UninitializedBuffer))


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called: an nn.ModuleList and an nn.ModuleDict only hold modules."""
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward is not nn.Module.forward
