"""What the modules of a dense block hold beside parameters, buffers and children, to be compared at every forward.

A trial verifies a block as it is. An attribute that was neutral then (a scale of 1, a second dropout of rate 0) may be
changed later, and the block's forward computes something else from then on: so its state then is remembered.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from .._mixins import base_class

Values = tuple[tuple[str, Any], ...]


class State(NamedTuple):
    """The name of a class, and the values of its own attributes or of those of one of its modules."""

    name: str
    values: Values


class Identity(NamedTuple):
    """Stands for an object that is compared by identity; a tensor, by its version too."""

    number: int
    version: int = 0


class Fingerprint(NamedTuple):
    """The states of the modules of a block, and of their classes."""

    modules: tuple[State, ...]
    classes: tuple[State, ...]


def fingerprint(block: nn.Module) -> Fingerprint:
    """The state of `block` and all modules inside that a trial takes as given.

    It holds no reference to a module or a tensor. Objects are compared by identity, tensors by identity and version;
    a copy of a module that has such attributes is therefore verified anew.
    """
    modules = list(_modules(block))
    classes = dict.fromkeys(base_class(type(module)) for module in modules)
    own = dict.fromkeys(each for cls in classes for each in cls.__mro__ if not _is_known(each))
    return Fingerprint(
        tuple(map(_state, modules)), tuple(State(cls.__name__, _values(vars(cls), _OF_EVERY_CLASS)) for cls in own)
    )


def describe_change(before: Fingerprint, after: Fingerprint) -> str:
    """The first difference between two fingerprints, such as "scale of a DenseLayer was 1.0 and is 0.5"."""
    if [state.name for state in before.modules] != [state.name for state in after.modules]:
        return "its modules are others"
    for old, new in zip(before.modules + before.classes, after.modules + after.classes, strict=False):
        old_values, new_values = dict(old.values), dict(new.values)
        for key in {**old_values, **new_values}:
            values = old_values.get(key, _MISSING), new_values.get(key, _MISSING)
            if values[0] != values[1]:
                return f"{key} of a {old.name} {_difference(*values)}"
    return "its classes are others"


def _difference(old: Any, new: Any) -> str:
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
    cls = base_class(type(module))
    # What a module of torch holds is read, or the module called, at every forward. Only a dropout's place is a belief.
    if _is_known(cls):
        return State(
            cls.__name__, (("p", module.p), ("inplace", module.inplace)) if isinstance(module, _DropoutNd) else ()
        )
    attributes = vars(module)
    if "_former_parameters" in attributes:  # a replica of nn.DataParallel holds its parameters as attributes
        parameters = attributes["_former_parameters"].keys() | {"_former_parameters"}
        attributes = {name: value for name, value in attributes.items() if name not in parameters}
    return State(cls.__name__, _values(attributes, _OF_EVERY_MODULE))


def _is_known(cls: type) -> bool:
    """Whether this is a class of torch or Python, and not of an author."""
    return (cls.__module__ or "").startswith(("torch.nn.modules.", "builtins", "typing", "abc"))


def _values(attributes: Mapping[str, Any], ignored: frozenset[str]) -> Values:
    return tuple((name, _frozen(attributes[name])) for name in sorted(attributes.keys() - ignored))


def _frozen(value: Any, depth: int = 3) -> Any:
    """`value` as something that compares equal only to a value that means the same, and refers to no object."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return Identity(id(value), value._version)
    if not depth:
        return Identity(id(value))
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each, depth - 1) for each in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(_frozen(each, depth - 1) for each in value)
    if isinstance(value, dict):
        return tuple((_frozen(key, depth - 1), _frozen(each, depth - 1)) for key, each in value.items())
    if hasattr(value, "__array_interface__") and value.nbytes <= _SMALL_ARRAY:
        return value.tobytes()
    if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
        return Identity(id(value)), _frozen(vars(value), depth - 1)
    return Identity(id(value))


_MISSING = object()
_SMALL_ARRAY = 1 << 12  # bytes: a larger array is compared by identity
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {
    "_conversion",  # of the conversion itself
    "keep_bottleneck",  # which is read at every forward
    "_is_replica",  # what nn.DataParallel makes of a module
}
_OF_EVERY_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__static_attributes__", "__firstlineno__"}
)
