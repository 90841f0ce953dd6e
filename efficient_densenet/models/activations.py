"""The activations that our models can have, by name."""

from collections.abc import Callable
from functools import partial

from torch import nn

from .._checks import check_choice

MakeActivation = Callable[[], nn.Module]
"""A class, or a function that makes a new module for each place."""

_NAMED: dict[str, MakeActivation] = {
    "relu": partial(nn.ReLU, inplace=True),
    "relu6": partial(nn.ReLU6, inplace=True),
    "leaky_relu": partial(nn.LeakyReLU, inplace=True),
    "prelu": nn.PReLU,
    "elu": partial(nn.ELU, inplace=True),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "mish": nn.Mish,
}

RELU = _NAMED["relu"]


def activation_maker(activation: str | MakeActivation) -> MakeActivation:
    """The function that makes the activations of a model, from a name or the function itself."""
    if not isinstance(activation, str) and callable(activation):
        return activation
    check_choice("activation", activation, tuple(_NAMED))
    return _NAMED[activation]
