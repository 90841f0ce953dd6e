"""The activations that our models can have, by name."""

from collections.abc import Callable
from functools import partial

from torch import nn

from .._checks import check, choice, describe

ActivationFactory = Callable[[], nn.Module]
"""A class, or a function that returns a new module for each place."""

_NAMED: dict[str, ActivationFactory] = {
    "relu": partial(nn.ReLU, inplace=True),
    "relu6": partial(nn.ReLU6, inplace=True),
    "leaky_relu": partial(nn.LeakyReLU, inplace=True),
    "prelu": nn.PReLU,
    "elu": partial(nn.ELU, inplace=True),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "mish": nn.Mish,
}

_NAMED |= {type(make()).__name__: make for make in _NAMED.values()}  # torch's names: "GELU", "LeakyReLU"

RELU = _NAMED["relu"]


def activation_factory(activation: str | ActivationFactory) -> ActivationFactory:
    """The function that returns the activations of a model, from a name or the function itself."""
    if isinstance(activation, str):
        check("activation", activation, choice(*_NAMED))
        return _NAMED[activation]
    if isinstance(activation, nn.Module) or not callable(activation):
        raise TypeError(
            f"activation is {describe(activation)}, but must be a name ({', '.join(_NAMED)}), or a class or function "
            "that returns a new module for each place, such as nn.SiLU or lambda: nn.LeakyReLU(0.2)"
        )
    return partial(_module, activation)


def _module(factory: ActivationFactory) -> nn.Module:
    try:
        module = factory()
    except TypeError as error:
        raise TypeError(f"activation is {describe(factory)}, which needs arguments: {error}") from error
    if not isinstance(module, nn.Module):
        raise TypeError(f"activation is {describe(factory)}, which returns {describe(module)}, not a module")
    return module
