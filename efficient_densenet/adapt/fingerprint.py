"""The state of a dense block's modules besides parameters, buffers and children, which is compared at every forward.

A trial verifies a block with its current state. An attribute that had no effect in the trial (a scale of 1, a second
dropout of rate 0) may be changed later, and change the results of the block's forward. So the state is saved.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from .._mixins import author_class
from ..norms.batch_norm import TORCH_CLASSES
from ..norms.frozen import is_frozen_batch_norm
from .outside import Place, is_known, is_of_a_library, names_in_methods, names_read, places_outside

Values = tuple[tuple[str, Any], ...]


class State(NamedTuple):
    """The name of a class, and the values of its own attributes or of the attributes of a module of this class."""

    name: str
    values: Values


@dataclass(frozen=True, eq=False)
class Identity:
    """Represents an object that is compared by identity or, in a copied fingerprint, by its name.

    Attributes:
        reference: a weak reference, since a new object may get the id of an object that was freed; the id of an object
            that allows no weak references; None in a copy.
        name: the name of the object, or of its class.
        version: the version counter of a tensor, or the length of a long collection.
    """

    reference: Any
    name: str
    version: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or (self.name, self.version) != (other.name, other.version):
            return False
        is_id = isinstance(self.reference, int)
        return self.reference == other.reference if is_id else self.reference is other.reference

    def __hash__(self) -> int:
        return hash(self.name)


def _identity(value: Any, version: int = 0) -> Identity:
    named: Any = value if isinstance(value, (type, FunctionType, BuiltinFunctionType)) else type(value)
    try:
        reference = weakref.ref(value)  # the same for each call, as long as the object lives
    except TypeError:
        reference = id(value)
    return Identity(reference, f"{getattr(named, '__module__', None)}.{named.__qualname__}", version)


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
        statistics: the names of the buffers that may have any values.
        with_settings: whether the settings of all of torch's modules belong to it, or only those that methods name.
    """

    modules: tuple[State, ...]
    classes: tuple[State, ...]
    ties: tuple[int, ...] = ()
    statistics: frozenset[str] = frozenset()
    with_settings: bool = False
    is_copy: bool = False

    def as_copy(self) -> "Fingerprint":
        """The part of the fingerprint that stays valid in a copy of the block or in another process."""
        return self._replace(modules=_as_copy(self.modules), classes=_as_copy(self.classes), is_copy=True)


def fingerprint(block: nn.Module, statistics: frozenset[str] = frozenset(), with_settings: bool = False) -> Fingerprint:
    """The state of `block` and all modules inside that a trial takes as given, without the buffers named in
    `statistics`, as `name_of_buffer` names them.

    It holds no reference to a module or a tensor. Objects are compared by identity and attributes, functions by code
    and the values that they read, large tensors by identity and version.
    """
    modules = list(_modules(block))
    classes = dict.fromkeys(map(class_as_written, modules))
    own = dict.fromkeys(each for cls in classes for each in cls.__mro__ if not is_known(each))
    read = _names_in_methods(tuple(own))
    first: dict[nn.Module, int] = {}
    ties = tuple(first.setdefault(module, i) for i, module in enumerate(modules))
    states = tuple(_state(module, statistics, read, with_settings) for module in modules)
    ties = ties if len(first) < len(ties) else ()
    return Fingerprint(states, tuple(map(_class_state, own)), ties, statistics, with_settings)


@cache
def _names_in_methods(classes: tuple[type, ...]) -> frozenset[str]:
    return frozenset[str]().union(*map(names_in_methods, classes))


def name_of_buffer(module: nn.Module, name: str) -> str:
    """The name of a buffer in `Fingerprint.statistics`, the same for all modules of a class."""
    return f"{class_as_written(module).__qualname__}.{name}"


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
    after = fingerprint(block, before.statistics, before.with_settings)
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
            return f"{key} of a {old.name} {_difference(before, after)}"
    return None


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


def _state(module: nn.Module, statistics: frozenset[str], read: frozenset[str], with_settings: bool) -> State:
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
        settings = _values({name: attributes[name] for name in names}, _OF_EVERY_MODULE)
        if not has_tensors:
            return State(name, _NO_TENSORS + settings)
        return State(name, (("names of tensors", TensorNames((*parameters, *module._buffers))), *settings))
    attributes = vars(module)
    if "_former_parameters" in attributes:  # a replica of nn.DataParallel holds its parameters as attributes
        replicated = attributes["_former_parameters"].keys() | {"_former_parameters"}
        attributes = {name: value for name, value in attributes.items() if name not in replicated}
    absent = (("set of absent tensors", tuple(name for name, value in _tensors(module) if value is None)),)
    buffers = tuple(
        (name, _frozen(value))
        for name, value in buffers_taken_as_given(module)
        if value is not None and name_of_buffer(module, name) not in statistics
    )
    return State(cls.__name__, _values(attributes, _OF_EVERY_MODULE) + absent + buffers)


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


def _is_small(value: Tensor) -> bool:
    """Whether `value` has few elements that can be read without waiting for a device, and memory, which FSDP may
    free."""
    is_ordinary = value.device.type == "cpu" and value.layout == torch.strided and type(value) is Tensor
    return is_ordinary and value.numel() <= 16 and value.untyped_storage().size() > 0


def _class_state(cls: type) -> State:
    """The values of a class's own attributes, which are compared exactly, and the outside values that its methods
    read."""
    own = tuple((name, _frozen(value)) for name, value in sorted(vars(cls).items()) if name not in _OF_EVERY_CLASS)
    return State(
        cls.__name__, own + tuple((place.name, _outside(place.value(), place)) for place in places_outside(cls))
    )


def _outside(value: Any, place: Place, depth: int = 2) -> Any:
    """A global or closure value as far as it is simple. Of an object or a class, only the attributes that its methods
    or the function at `place` may read are included."""
    if isinstance(value, ContextVar):
        value = value.get(None)
    if value is None or isinstance(value, (*_COMPARED_WHOLE, nn.Module)):
        return _frozen(value, 3)
    if not depth or is_of_a_library(value):
        return _identity(value)
    cls = value if isinstance(value, type) else type(value)
    attributes = _class_attributes(cls) if cls is value else getattr(value, "__dict__", {})
    names = sorted((names_read(cls).union(place.names) & attributes.keys()) - _OF_EVERY_MODULE)
    return _identity(cls), tuple((name, _outside(attributes[name], place, depth - 1)) for name in names)


def _class_attributes(cls: type) -> dict[str, Any]:
    authors = (each for each in reversed(cls.__mro__) if not is_known(each))
    return {name: value for each in authors for name, value in vars(each).items() if name != "__init__"}


def _values(attributes: Mapping[str, Any], ignored: frozenset[str]) -> Values:
    names = (name for name in sorted(attributes.keys() - ignored) if not name.startswith(_OF_FULLY_SHARD))
    return tuple((name, _value(name, attributes[name])) for name in names)


def _value(name: str, value: Any) -> Any:
    return DropRate(value) if _is_drop_rate(name, value) else _frozen(value)


def _is_drop_rate(name: str, value: Any) -> bool:
    return type(value) is float and "drop" in name and 0 <= value <= 1


def _frozen(value: Any, depth: int = 6) -> Any:
    """`value` in an immutable form without references to objects. Equal forms mean equivalent values."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if _is_small(value):
            return str(value.dtype), tuple(value.flatten().tolist())
        return _identity(value, 0 if value.is_inference() else value._version)
    if isinstance(value, FunctionType):
        return _frozen_function(value, depth)
    if not depth or isinstance(value, (type, ModuleType)):
        return _identity(value)
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > _MANY:
        return _identity(value, len(value))
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each, depth - 1) for each in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(_frozen(each, depth - 1) for each in value)
    if isinstance(value, dict):
        return tuple((_frozen(key, depth - 1), _frozen(each, depth - 1)) for key, each in value.items())
    if isinstance(value, (staticmethod, classmethod)):
        return _frozen(value.__func__, depth)
    if isinstance(value, MethodType):
        return _frozen_function(value.__func__, depth), _identity(value.__self__)
    if isinstance(value, partial):
        return _frozen((value.func, value.args, value.keywords), depth)
    if hasattr(value, "__array_interface__") and value.nbytes <= _SMALL_ARRAY:
        return value.tobytes()
    slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ()) if isinstance(name, str)]
    inside = {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        inside = {name: each for name, each in inside.items() if name not in _OF_EVERY_MODULE}
    return _identity(value), *((name, _frozen(each, depth - 1)) for name, each in inside.items())


def _frozen_function(function: Any, depth: int) -> Any:
    """The name and code of a function, and the values that it holds: together they determine its behavior."""
    if not isinstance(function, FunctionType):
        return _identity(function)
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY_CELL]
    held = [function.__defaults__, function.__kwdefaults__, *cells] if depth else []
    inside = tuple(_frozen(each, depth - 1) for each in held)
    return function.__module__, function.__qualname__, _digest(function.__code__), inside


@cache
def _digest(code: CodeType) -> str:
    """A hash of a function's code, which is the same in another process."""
    constants = [_digest(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    texts = [sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each) for each in constants]
    return sha256(repr((code.co_code, code.co_names, texts)).encode()).hexdigest()


def _as_copy(value: Any) -> Any:
    if isinstance(value, Identity):
        return Identity(None, value.name)
    if isinstance(value, (DropRate, TensorNames)):
        return value
    if isinstance(value, State):
        return State(value.name, _as_copy(value.values))
    if isinstance(value, (tuple, frozenset)):
        return type(value)(map(_as_copy, value))
    return value


_BATCH_NORMS = set(TORCH_CLASSES.values())
"""One of them may become another, as by `convert_sync_batchnorm`: engines read which it is at every forward."""

_NO_TENSORS: Values = (("names of tensors", TensorNames()),)
_MISSING = object()
_MANY = 10_000
_EMPTY_CELL = CellType()
_COMPARED_WHOLE = (bool, int, float, str, list, tuple, set, frozenset, dict, Tensor)
_COMPARED_WHOLE += (FunctionType, MethodType, staticmethod, classmethod, partial)
_OF_FULLY_SHARD = "__composable_api_state_key"
_SMALL_ARRAY = 1 << 12  # bytes: a larger array is compared by identity
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {
    "_conversion",  # added by the conversion itself
    "keep_bottleneck",  # read at every forward
    "_is_replica",  # set by nn.DataParallel
}
_OF_EVERY_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__static_attributes__", "__firstlineno__"}
)
