"""Subclasses made for somebody else's module, so that its behaviour changes while it stays the same object."""

from functools import cache
from typing import Any

from torch import nn


def add_mixin(module: nn.Module, mixin: type, innermost: bool = False) -> None:
    """Put `mixin` before the class of `module`: before all others put there, or behind them."""
    others = _mixins(module)
    module.__class__ = _made(_root(module), (mixin, *others) if innermost else (*others, mixin))


def remove_mixin(module: nn.Module, mixin: type) -> None:
    """Undo `add_mixin`."""
    if mixin not in _mixins(module):
        raise RuntimeError(
            f"found that the class of a {type(module).__name__} has been changed again since it was changed here, as "
            "parametrizations do: undo that first"
        )
    module.__class__ = _made(_root(module), tuple(m for m in _mixins(module) if m is not mixin))


def original(module: nn.Module, *known: type) -> type[nn.Module]:
    """The class of `module` before `known` mixins, and no others, were put before it."""
    return _root(module) if set(_mixins(module)) <= set(known) else type(module)


def _root(module: nn.Module) -> type[nn.Module]:
    return vars(type(module)).get("_made_from", type(module))


def _mixins(module: nn.Module) -> tuple[type, ...]:
    return vars(type(module)).get("_made_with", ())


@cache
def _made(root: type[nn.Module], mixins: tuple[type, ...]) -> type[nn.Module]:
    if not mixins:
        return root
    body = {
        "__module__": root.__module__,
        "__qualname__": root.__qualname__,
        "__reduce_ex__": _reduce,
        "_made_from": root,
        "_made_with": mixins,
    }
    return type(root.__name__, (mixins[-1], _made(root, mixins[:-1])), body)


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle by the classes it was made from, which can be imported."""
    state = module.__getstate__() if hasattr(module, "__getstate__") else module.__dict__
    return _blank, (_root(module), _mixins(module)), state


def _blank(root: type[nn.Module], mixins: tuple[type, ...]) -> nn.Module:
    cls = _made(root, mixins)
    return cls.__new__(cls)
