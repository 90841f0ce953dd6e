"""What the modules of a dense block hold beside parameters, buffers and children, to be compared at every forward.

A trial verifies a block as it is. An attribute that was neutral then (a scale of 1, a second dropout of rate 0) may be
changed later, and the block's forward computes something else from then on: so its state then is remembered.
"""

from abc import ABC
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from .._mixins import author_class

Values = tuple[tuple[str, Any], ...]


class State(NamedTuple):
    """The name of a class, and the values of its own attributes or of those of one of its modules."""

    name: str
    values: Values


class Identity(NamedTuple):
    """Stands for an object that is compared by identity; a tensor, by its version too."""

    number: int
    version: int = 0


class DropRate(NamedTuple):
    """A probability of dropout. If it was not 0 in the trial, the place of the dropout is verified for any."""

    value: float


class Fingerprint(NamedTuple):
    """The states of the modules of a block, and of their classes."""

    modules: tuple[State, ...]
    classes: tuple[State, ...]

    def without_identities(self) -> "Fingerprint":
        """What it still is in a copy or in another process: no identities, and so no classes."""
        return Fingerprint(tuple(State(name, _without_identities(values)) for name, values in self.modules), ())


def fingerprint(block: nn.Module) -> Fingerprint:
    """The state of `block` and all modules inside that a trial takes as given.

    It holds no reference to a module or a tensor. Objects are compared by identity and what they hold, large tensors
    by identity and version.
    """
    modules = list(_modules(block))
    classes = dict.fromkeys(map(author_class, modules))
    own = dict.fromkeys(each for cls in classes for each in cls.__mro__ if not _is_known(each))
    return Fingerprint(
        tuple(map(_state, modules)), tuple(State(cls.__name__, _values(vars(cls), _OF_EVERY_CLASS)) for cls in own)
    )


def plain_attributes(block: nn.Module) -> tuple[tuple[tuple[str, bool | int | float | str], ...], ...]:
    """The names and values of the numbers, flags and texts that each author's module in `block` holds."""
    return tuple(
        tuple((name, value) for name, value in vars(module).items() if isinstance(value, (bool, int, float, str)))
        if not _is_known(author_class(module))
        else ()
        for module in block.modules()
    )


def holds_attributes(block: nn.Module, attributes: tuple[tuple[tuple[str, Any], ...], ...]) -> bool:
    """Whether they are `plain_attributes(block)`. A compiler that traces this compiles again when one has changed."""
    pairs = zip(block.modules(), attributes, strict=True)
    return all(getattr(module, name) == value for module, values in pairs for name, value in values)


def change_since(before: Fingerprint, block: nn.Module) -> str | None:
    """The first change of a block's state, such as "scale of a DenseLayer was 1.0 and is 0.5", or None.

    What has been added since counts only if a method of the class may read it.
    """
    after = fingerprint(block)
    if after == before:
        return None
    if not before.classes:
        after = after.without_identities()
    names, new_names = ([state.name for state in each.modules] for each in (before, after))
    if names != new_names:
        other = ((name, new) for name, new in zip(names, new_names, strict=False) if name != new)
        return next((f"{new} is in the place of {name}" for name, new in other), "it has more or fewer modules")
    for module, old, new in zip(_modules(block), before.modules, after.modules, strict=True):
        change = _change(old, new, names_read(author_class(module)))
        if change is not None:
            return change
    changes = (_change(old, new, None) for old, new in zip(before.classes, after.classes, strict=False))
    return next(filter(None, changes), None)


def _change(old: State, new: State, names_read: frozenset[str] | None) -> str | None:
    """The first change of a module's attributes; of those that are new, only of `names_read`, if that is given."""
    old_values, new_values = dict(old.values), dict(new.values)
    for key in {**old_values, **new_values}:
        before, after = old_values.get(key, _MISSING), new_values.get(key, _MISSING)
        verified_for_any = isinstance(before, DropRate) and before.value != 0 and isinstance(after, DropRate)
        unread = before is _MISSING and names_read is not None and key not in names_read
        if before != after and not verified_for_any and not unread:
            return f"{key} of a {old.name} {_difference(before, after)}"
    return None


@cache
def names_read(cls: type) -> frozenset[str]:
    """The names and texts in the methods of an author's class."""
    functions = (value for each in cls.__mro__ if not _is_known(each) for value in vars(each).values())
    return frozenset(name for f in functions if isinstance(f, FunctionType) for name in _names_in(f.__code__))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)


def _difference(old: Any, new: Any) -> str:
    old, new = (value.value if isinstance(value, DropRate) else value for value in (old, new))
    if all(isinstance(value, (bool, int, float, str)) for value in (old, new)):
        return f"was {old!r} and is {new!r}"
    return "was added" if old is _MISSING else "was removed" if new is _MISSING else "has changed"


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """Like `module.modules()`, but several times as fast."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)


def _state(module: nn.Module) -> State:
    cls = author_class(module)
    if isinstance(module, _DropoutNd):
        return State(cls.__name__, (("p", DropRate(module.p)), ("inplace", module.inplace)))
    if _is_known(cls):  # what a module of torch holds is read, or the module called, at every forward
        return State(cls.__name__, ())
    attributes = vars(module)
    if "_former_parameters" in attributes:  # a replica of nn.DataParallel holds its parameters as attributes
        parameters = attributes["_former_parameters"].keys() | {"_former_parameters"}
        attributes = {name: value for name, value in attributes.items() if name not in parameters}
    absent = (("set of absent tensors", tuple(name for name, value in _tensors(module) if value is None)),)
    # Flags are small, and on the CPU where reading them does not wait.
    buffers = {} if isinstance(module, _NormBase) else module._buffers  # but not the number of batches
    flags = tuple((name, _frozen(value)) for name, value in buffers.items() if _is_flag(value))
    return State(cls.__name__, _values(attributes, _OF_EVERY_MODULE) + absent + flags)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [*module._parameters.items(), *module._buffers.items()]


def _is_flag(value: Tensor | None) -> bool:
    return value is not None and not value.is_floating_point() and _is_small(value)


def _is_small(value: Tensor) -> bool:
    return (
        value.device.type == "cpu" and value.layout == torch.strided and type(value) is Tensor and value.numel() <= 16
    )


def _is_known(cls: type) -> bool:
    """Whether this is a class of torch or Python, and not of an author, whose classes may have no module's name."""
    return cls in (object, ABC, Generic) or (cls.__module__ or "").startswith("torch.nn.modules.")


def _values(attributes: Mapping[str, Any], ignored: frozenset[str]) -> Values:
    names = (name for name in sorted(attributes.keys() - ignored) if not name.startswith(_OF_FULLY_SHARD))
    return tuple((name, _value(name, attributes[name])) for name in names)


def _value(name: str, value: Any) -> Any:
    return DropRate(value) if type(value) is float and "drop" in name else _frozen(value)


def _frozen(value: Any, depth: int = 6) -> Any:
    """`value` as something that compares equal only to a value that means the same, and refers to no object."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if _is_small(value):
            return str(value.dtype), tuple(value.flatten().tolist())
        return Identity(id(value), 0 if value.is_inference() else value._version)
    if not depth or isinstance(value, (nn.Module, type, FunctionType)):
        return Identity(id(value))
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > _MANY:
        return Identity(id(value), len(value))
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each, depth - 1) for each in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(_frozen(each, depth - 1) for each in value)
    if isinstance(value, dict):
        return tuple((_frozen(key, depth - 1), _frozen(each, depth - 1)) for key, each in value.items())
    if hasattr(value, "__array_interface__") and value.nbytes <= _SMALL_ARRAY:
        return value.tobytes()
    slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ()) if isinstance(name, str)]
    inside = {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})
    return (Identity(id(value)), *((_frozen(inside, depth - 1),) if inside else ()))


def _without_identities(value: Any) -> Any:
    if isinstance(value, Identity):
        return None
    if isinstance(value, DropRate):
        return value
    if isinstance(value, (tuple, frozenset)):
        return type(value)(map(_without_identities, value))
    return value


_MISSING = object()
_MANY = 100
_OF_FULLY_SHARD = "__composable_api_state_key"
_SMALL_ARRAY = 1 << 12  # bytes: a larger array is compared by identity
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {
    "_conversion",  # of the conversion itself
    "keep_bottleneck",  # which is read at every forward
    "_is_replica",  # what nn.DataParallel makes of a module
}
_OF_EVERY_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__static_attributes__", "__firstlineno__"}
)
