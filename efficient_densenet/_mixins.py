"""Add mixins to the class of an existing module, and remove them.

The module stays the same object. Its class becomes a subclass of the mixins and its original class, under the original
name, and can be copied and pickled.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from ._compilers import constant_to_compilers
from ._torch_private import class_before_fully_shard

if TYPE_CHECKING:
    ModuleMixin = nn.Module
else:
    ModuleMixin = object
"""The base of mixins for modules: `object`, and nn.Module to a type checker, since a mixin calls a module's methods."""


def add_mixin(module: nn.Module, mixin: type, innermost: bool = False) -> None:
    """Put `mixin` before the class of `module` in the method resolution order.

    Args:
        module: changed in place.
        mixin: the class to add.
        innermost: True to put `mixin` after all mixins that `module` has already, False to put it before them.
    """
    others = _mixins(type(module))
    module.__class__ = _subclass(base_class(type(module)), (mixin, *others) if innermost else (*others, mixin))


def remove_mixin(module: nn.Module, mixin: type) -> None:
    """Undo `add_mixin`."""
    if mixin not in _mixins(type(module)):
        raise RuntimeError(
            f"found a {type(module).__name__} whose class was changed again since {mixin.__name__} was added to it, as "
            "parametrizations do: undo that first"
        )
    module.__class__ = _subclass(base_class(type(module)), tuple(m for m in _mixins(type(module)) if m is not mixin))


def original_class(module: nn.Module, *known: type) -> type[nn.Module]:
    """The class of `module` without its mixins if all of them are in `known`, and otherwise its class as it is."""
    return base_class(type(module)) if set(_mixins(type(module))) <= set(known) else type(module)


@constant_to_compilers
def base_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class to which mixins were added to make `cls`, or `cls` itself."""
    return vars(cls).get("_class_before_mixins", cls)


@cache
def author_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class `cls` without our mixins and without the class that `fully_shard` has added before or after them."""
    return class_before_fully_shard(base_class(class_before_fully_shard(cls)))


@constant_to_compilers
def _mixins(cls: type[nn.Module]) -> tuple[type, ...]:
    """The mixins that were added to make `cls`, the innermost first."""
    return vars(cls).get("_added_mixins", ())


@cache
def _subclass(base: type[nn.Module], mixins: tuple[type, ...]) -> type[nn.Module]:
    if not mixins:
        return base
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": _reduce,
        "_class_before_mixins": base,
        "_added_mixins": mixins,
    }
    return type(base.__name__, (mixins[-1], _subclass(base, mixins[:-1])), body)


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle a module by its base class and mixins, which can be imported; the subclass itself cannot."""
    state = module.__getstate__() if hasattr(module, "__getstate__") else module.__dict__
    return _new_instance, (base_class(type(module)), _mixins(type(module))), state


def _new_instance(base: type[nn.Module], mixins: tuple[type, ...]) -> nn.Module:
    cls = _subclass(base, mixins)
    return cls.__new__(cls)
