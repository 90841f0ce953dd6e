"""Read the parts of a dense layer from the modules inside it."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._compilers import constant_to_compilers
from .._mixins import base_class
from ..engine.parts import LayerParts, NoPartsError, activations_of
from ..kernels.activations import RELU_SPEC, ActivationSpec, module_of
from .outside import names_read

_DROPOUTS = {
    nn.Dropout.forward: F.dropout,
    nn.Dropout1d.forward: F.dropout1d,
    nn.Dropout2d.forward: F.dropout2d,
    nn.Dropout3d.forward: F.dropout3d,
}


def read_layer(
    layer: nn.Module, modules: Sequence[nn.Module] | None = None, activation: ActivationSpec = RELU_SPEC
) -> LayerParts:
    """The parts of a layer: norm, activation and convolution, once or twice, and perhaps dropout.

    `modules` are the modules to read; by default, all modules inside. `activation` is applied where no module is.
    """
    norms, convolutions, activations, dropouts = [], [], [], []
    modules = list(leaf_modules(layer)) if modules is None else modules
    for module in modules:
        if any(is_lazy(parameter) for parameter in module.parameters()):
            raise NoPartsError(f"found a {type(module).__name__} that has not seen data yet")
        if is_any_norm(module):
            norms.append(module)
        elif isinstance(module, _ConvNd):
            convolutions.append(module)
        elif isinstance(module, _DropoutNd):
            dropouts.append(module)
        elif not isinstance(module, nn.Identity):
            activations.append(module)
    if len(dropouts) > 1:
        raise NoPartsError(
            f"found {len(dropouts)} dropouts in a {type(layer).__name__}, where a dense layer has at most one, after "
            "its last convolution"
        )
    if not (1 <= len(norms) == len(convolutions) <= 2 and len(activations) <= len(norms)):
        names = ", ".join(type(module).__name__ for module in modules[:8]) + (", …" if len(modules) > 8 else "")
        found = f"{type(layer).__name__} of {names}" if names else type(layer).__name__
        raise NoPartsError(
            f"found a {found}, where a dense layer is norm, activation and convolution, once or twice, and perhaps "
            "dropout"
        )
    drop_rate, dropout = _dropout(layer, *dropouts)
    (norm1, *norm2), (conv1, *conv2) = norms, convolutions
    return LayerParts(
        layer,
        *(norm1, conv1, *norm2, *conv2),
        activations=_activations(norms, activations, module_of(activation)),
        drop_rate=drop_rate,
        dropout=dropout,
        keep_bottleneck=bool(getattr(layer, "keep_bottleneck", False)),
    )


def _activations(
    norms: Sequence[nn.Module], separate: Sequence[nn.Module], function: nn.Module
) -> tuple[nn.Module, ...]:
    """The activation after each norm: inside it, or separate, of which the last may be used twice, or a function."""
    activations, rest = [], list(separate)
    for norm in norms:
        fused = activations_of(norm)
        if len(fused) > 1:
            raise NoPartsError(f"found a {type(norm).__name__} with several activations")
        activations += fused or rest[:1] or [function]
        if not fused and len(rest) > 1:
            del rest[0]
    return tuple(activations)


def leaf_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside `module` that have no children, or that are norms or convolutions."""
    for child in module.children():
        if is_any_norm(child) or isinstance(child, _ConvNd) or not any(True for _ in child.children()):
            yield child
        else:
            yield from leaf_modules(child)


def is_composed(module: nn.Module) -> bool:
    """Whether `module` computes something with a convolution and other modules."""
    leaves = list(leaf_modules(module))
    return len(leaves) > 1 and any(isinstance(leaf, _ConvNd) for leaf in leaves)


def is_any_norm(module: nn.Module) -> bool:
    """Whether `module` is a norm of any kind; the engines decide later which kinds they can run."""
    return isinstance(module, (_NormBase, nn.GroupNorm, nn.LayerNorm)) or "Norm" in type(module).__name__


def _dropout(layer: nn.Module, module: _DropoutNd | None = None) -> tuple[float, Callable[[Tensor, float], Tensor]]:
    """The current drop rate of a layer and its dropout function, from its dropout module or else its attributes."""
    if module is not None:
        dropout = _DROPOUTS.get(type(module).forward)
        if dropout is None:
            raise NoPartsError(f"found a {type(module).__name__} inside a layer, with a forward of its own")
        return (module.p if module.training else 0.0), dropout
    values = [getattr(layer, name, None) for name in _drop_names(type(layer))]
    rates = [value for value in values if type(value) is float and value]
    if len(rates) > 1:
        raise NoPartsError(f"found a {type(layer).__name__} with several rates of dropout")
    return (rates[0] if rates and layer.training else 0.0), F.dropout


@constant_to_compilers
def _drop_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names in the methods of an author's class that may be names of dropout rates."""
    return _cached_drop_names(cls)


@cache
def _cached_drop_names(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(name for name in sorted(names_read(base_class(cls))) if "drop" in name and name.isidentifier())


def is_dense_layer(module: nn.Module) -> bool:
    """Whether `module` has the parts of a dense layer."""
    if not has_forward(module):
        return False
    try:
        read_layer(module)
    except NoPartsError:
        return False
    return True


def is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, (UninitializedParameter, UninitializedBuffer))


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called: an nn.ModuleList and an nn.ModuleDict only hold modules."""
    return type(module).forward is not nn.Module.forward
