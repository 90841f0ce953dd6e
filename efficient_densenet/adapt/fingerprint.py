"""The state of a dense block's modules besides parameters, buffers and children, which is compared at every forward.

A trial verifies a block with its current state. An attribute that had no effect in the trial (a scale of 1, a second
dropout of rate 0) may be changed later, and change the results of the block's forward. So the state is saved.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from .._mixins import author_class
from ..norms.batch_norm import TORCH_CLASSES
from ..norms.frozen import is_frozen_batch_norm
from .frozen_values import OF_EVERY_MODULE, as_copy, frozen, unwatched_in
from .outside import READ_ANY_ATTRIBUTE, is_known, names_in_methods, names_read

Values = tuple[tuple[str, Any], ...]


class State(NamedTuple):
    """The name of a class, and the values of its own attributes or of the attributes of a module of this class."""

    name: str
    values: Values


class DropRate(NamedTuple):
    """A probability of dropout. If it was not 0 in the trial, any other probability is verified too: the trial tries
    several, with different ones in each dropout of a block."""

    value: float


class TensorNames(tuple[str, ...]):
    """The names of the parameters and buffers of one of torch's modules. Names may disappear, as by sharding. A new
    name, such as `weight_orig`, means that the weight is now computed from this parameter."""


class Fingerprint(NamedTuple):
    """The states of the modules of a block, and of their classes; in a copy, objects are compared by their names.

    Attributes:
        ties: for each module the first place of it, where one module has several.
        with_settings: whether the settings of all of torch's modules belong to it, or only those that methods name.
    """

    modules: tuple[State, ...]
    classes: tuple[State, ...]
    ties: tuple[int, ...] = ()
    with_settings: bool = False
    is_copy: bool = False

    def as_copy(self) -> "Fingerprint":
        """The part of the fingerprint that stays valid in a copy of the block or in another process."""
        return self._replace(modules=_as_copies(self.modules), classes=_as_copies(self.classes), is_copy=True)


def fingerprint(block: nn.Module, with_settings: bool = False) -> Fingerprint:
    """The state of `block` and all modules inside that a trial takes as given.

    It holds no reference to a module or a tensor. Objects are compared by identity, functions by code and the values
    that they read, large tensors by identity and version.
    """
    modules = list(_modules(block))
    own = _authors_classes(modules)
    read = _names_in_methods(own)
    first: dict[nn.Module, int] = {}
    ties = tuple(first.setdefault(module, i) for i, module in enumerate(modules))
    states = tuple(_state(module, read, with_settings) for module in modules)
    ties = ties if len(first) < len(ties) else ()
    return Fingerprint(states, tuple(_class_state(cls, read) for cls in own), ties, with_settings)


def _authors_classes(modules: Iterable[nn.Module]) -> tuple[type, ...]:
    classes = dict.fromkeys(map(class_as_written, modules))
    return tuple(dict.fromkeys(each for cls in classes for each in cls.__mro__ if not is_known(each)))


def why_not_watched(modules: Sequence[nn.Module]) -> str | None:
    """Why the forwards of `modules` may read values whose changes no fingerprint shows, or None."""
    own = _authors_classes(modules)
    read = _names_in_methods(own) | {"forward"}
    reads_any_attribute = not read.isdisjoint(READ_ANY_ATTRIBUTE)
    states = [_state(module, read, False) for module in modules] + [_class_state(cls, read) for cls in own]
    for state in states:
        for name, value in state.values:
            may_be_read = name in read or name.startswith("__") or reads_any_attribute
            found = next(unwatched_in(value), None) if may_be_read and name != "__init__" else None
            if found is not None:
                return f"found that {name} of a {state.name} may read a {found.name}, whose changes go unnoticed"
    return None


@cache
def _names_in_methods(classes: tuple[type, ...]) -> frozenset[str]:
    return frozenset[str]().union(*map(names_in_methods, classes))


def plain_attributes(block: nn.Module) -> tuple[tuple[tuple[str, bool | int | float | str], ...], ...]:
    """The names and values of the numbers, flags and strings that each author's module in `block` holds."""
    return tuple(
        tuple((name, value) for name, value in vars(module).items() if isinstance(value, (bool, int, float, str)))
        if not is_known(class_as_written(module))
        else ()
        for module in block.modules()
    )


def holds_attributes(block: nn.Module, attributes: tuple[tuple[tuple[str, Any], ...], ...]) -> bool:
    """Whether `attributes` equal `plain_attributes(block)`. A compiler that traces this recompiles when one changes."""
    pairs = zip(block.modules(), attributes, strict=True)
    return all(getattr(module, name) == value for module, values in pairs for name, value in values)


def change_since(before: Fingerprint, block: nn.Module) -> str | None:
    """The first change of a block's state, such as "scale of a DenseLayer was 1.0 and is 0.5", or None.

    An attribute that was added since counts only if a method of the class may read it.
    """
    after = fingerprint(block, before.with_settings)
    if after == before:
        return None
    if before.is_copy:
        after = after.as_copy()
    if len(before.modules) != len(after.modules):
        return "it has other modules"
    for old, new in zip(before.modules, after.modules, strict=True):
        if old.name != new.name:
            return f"a {old.name} has become a {new.name}"
    for module, old, new in zip(_modules(block), before.modules, after.modules, strict=True):
        change = _change(old, new, names_read(class_as_written(module)))
        if change is not None:
            return change
    if before.ties != after.ties:
        return "other modules have several names"
    changes = (_change(old, new, None) for old, new in zip(before.classes, after.classes, strict=False))
    return next(filter(None, changes), None)


def _change(old: State, new: State, names_read: frozenset[str] | None) -> str | None:
    """The first change of a module's attributes. Of new attributes, only `names_read` count, if they are given."""
    old_values, new_values = dict(old.values), dict(new.values)
    for key in {**old_values, **new_values}:
        before, after = old_values.get(key, _MISSING), new_values.get(key, _MISSING)
        verified_for_any = isinstance(before, DropRate) and before.value != 0 and isinstance(after, DropRate)
        unread = before is _MISSING and names_read is not None and key not in names_read
        if isinstance(before, TensorNames) and isinstance(after, TensorNames):
            added = [name for name in after if name not in before]
            if added:
                return f"{added[0]} of a {old.name} was added"
            continue
        if before != after and not verified_for_any and not unread:
            name, *values = (key, before, after) if names_read is not None else _innermost(key, before, after)
            return f"{name} of a {old.name} {_difference(*values)}"
    return None


def _innermost(name: str, before: Any, after: Any) -> tuple[str, Any, Any]:
    """The name and values of the variable by which two forms of a method differ."""
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        different = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
        if len(before) == 2 and isinstance(before[0], str) and before[0] == after[0]:
            return _innermost(before[0], before[1], after[1])
        if len(different) == 1:
            return _innermost(name, *different[0])
    return name, before, after


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


def class_as_written(module: nn.Module) -> type[nn.Module]:
    """The class of `module` as its author wrote it: torch's class for a norm under the exactly-once rule."""
    cls = author_class(module)
    return TORCH_CLASSES.get(cls, cls)


def _state(module: nn.Module, read: frozenset[str], with_settings: bool) -> State:
    """The state of a module. `read` are the names in the methods of the authors' classes, which may read the settings
    of torch's modules; `with_settings` adds all settings of torch's modules without tensors."""
    cls = class_as_written(module)
    if isinstance(module, _DropoutNd):
        return State(cls.__name__, (("p", DropRate(module.p)), ("inplace", module.inplace)))
    if is_known(cls):  # at every forward, torch's modules are called or their attributes read
        name = "BatchNorm" if cls in _BATCH_NORMS else cls.__name__
        attributes = vars(module)
        parameters = module._parameters or attributes.get("_former_parameters", ())
        has_tensors = bool(parameters or module._buffers)
        names = attributes.keys() if with_settings and not has_tensors else read & attributes.keys()
        settings = _values({name: attributes[name] for name in names}, read)
        if not has_tensors:
            return State(name, _NO_TENSORS + settings)
        return State(name, (("names of tensors", TensorNames((*parameters, *module._buffers))), *settings))
    attributes = vars(module)
    if "_former_parameters" in attributes:  # a replica of nn.DataParallel holds its parameters as attributes
        replicated = attributes["_former_parameters"].keys() | {"_former_parameters"}
        attributes = {name: value for name, value in attributes.items() if name not in replicated}
    absent = (("set of absent tensors", tuple(name for name, value in _tensors(module) if value is None)),)
    given = ((name, value) for name, value in buffers_taken_as_given(module) if value is not None)
    buffers = tuple((name, frozen(value, read)) for name, value in given)
    return State(cls.__name__, _values(attributes, read) + absent + buffers)


def buffers_taken_as_given(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    """The buffers of an author's module, which a trial verifies only for their current values. The engines read the
    buffers of norms at every forward, and torch's other modules read their own buffers."""
    if not module._buffers or isinstance(module, _NormBase) or is_frozen_batch_norm(module):
        return []
    if (class_as_written(module).__module__ or "").startswith("torch."):
        return []
    return list(module._buffers.items())


def drop_rates(module: nn.Module) -> list[str]:
    """The names of the attributes of `module` that are rates of dropout, which are verified for any value."""
    if isinstance(module, _DropoutNd):
        return ["p"] if module.p else []
    if is_known(class_as_written(module)):
        return []
    return [name for name, value in vars(module).items() if value and _is_drop_rate(name, value)]


def _tensors(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [*module._parameters.items(), *module._buffers.items()]


def _class_state(cls: type, read: frozenset[str]) -> State:
    """The values of a class's own attributes, which are compared exactly. A method consists of the values that it
    reads."""
    own = ((name, value) for name, value in sorted(vars(cls).items()) if name not in _OF_EVERY_CLASS)
    return State(cls.__name__, tuple((name, frozen(value, read)) for name, value in own))


def _as_copies(states: tuple[State, ...]) -> tuple[State, ...]:
    return tuple(State(state.name, as_copy(state.values)) for state in states)


def _values(attributes: Mapping[str, Any], read: frozenset[str]) -> Values:
    names = (name for name in sorted(attributes.keys() - OF_EVERY_MODULE) if not name.startswith(_OF_FULLY_SHARD))
    return tuple((name, _value(name, attributes[name], read)) for name in names)


def _value(name: str, value: Any, read: frozenset[str]) -> Any:
    return DropRate(value) if _is_drop_rate(name, value) else frozen(value, read)


def _is_drop_rate(name: str, value: Any) -> bool:
    return type(value) is float and "drop" in name and 0 <= value <= 1


_BATCH_NORMS = set(TORCH_CLASSES.values())
"""One of them may become another, as by `convert_sync_batchnorm`: engines read which it is at every forward."""

_NO_TENSORS: Values = (("names of tensors", TensorNames()),)
_MISSING = object()
_OF_FULLY_SHARD = "__composable_api_state_key"
_OF_EVERY_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__static_attributes__", "__firstlineno__"}
    | {"__annotations__", "__annotate_func__", "__annotations_cache__"}
)
