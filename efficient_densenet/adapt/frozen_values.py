"""Values in an immutable form, to be compared later. Equal forms mean equivalent values.

A number that a forward reads may come from anywhere. What has no such form, such as a `deque`, is `Unwatched`: it may
change what a forward computes, and nobody would notice.
"""

import re
import weakref
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property, partial
from hashlib import sha256
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn

from .outside import (
    READ_ANY_ATTRIBUTE,
    READ_ANYTHING,
    attributes_of_class,
    is_known,
    is_of_a_library,
    names_in_function,
    names_read,
    values_read_by,
)


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


class Unwatched(Identity):
    """An object whose changes are not noticed, or not all of them."""


def _identity(value: Any, version: int = 0, kind: type[Identity] = Identity) -> Identity:
    named: Any = value if isinstance(value, (type, FunctionType, BuiltinFunctionType)) else type(value)
    try:
        reference = weakref.ref(value)  # the same for each call, as long as the object lives
    except TypeError:
        reference = id(value)
    return kind(reference, f"{getattr(named, '__module__', None)}.{named.__qualname__}", version)


def unwatched_in(form: Any) -> Iterator[Unwatched]:
    """The objects in a form that are not watched."""
    if isinstance(form, Unwatched):
        yield form
    elif isinstance(form, (tuple, frozenset)):
        for each in form:
            yield from unwatched_in(each)


def as_copy(form: Any) -> Any:
    """A form in which objects are compared by their names, as in a copy of a model."""
    if isinstance(form, Identity):
        return Identity(None, form.name)
    return type(form)(map(as_copy, form)) if type(form) in (tuple, frozenset) else form


def frozen(value: Any, names: frozenset[str], depth: int = 6, seen: set[Any] | None = None) -> Any:
    """`value` in an immutable form without references to objects.

    Args:
        names: the names in the code that may read the value: attributes of other names do not count.
        seen: the functions and classes that are in the form already.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Tensor):
        if is_small(value):
            return str(value.dtype), tuple(value.flatten().tolist())
        return _identity(value, 0 if value.is_inference() else value._version)
    if _is_constant(value):
        return _identity(value, kind=Unwatched if any(value is each for each in READ_ANYTHING) else Identity)
    seen = set() if seen is None else seen
    if isinstance(value, FunctionType):
        return _frozen_function(value, names, depth, seen)
    if not depth:
        return _identity(value, kind=Unwatched)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        form = _frozen_collection(value, names, depth, seen)
        return form if is_of_a_library(type(value)) else (form, *_frozen_object(value, names, depth, seen)[1:])
    if _is_array(value):
        return value.tobytes() if value.nbytes <= _SMALL_ARRAY else _identity(value, kind=Unwatched)
    if isinstance(value, (type, ModuleType)):
        attributes = {} if value in seen else attributes_of_class(value) if isinstance(value, type) else vars(value)
        seen.add(value)
        read = sorted(name for name, each in attributes.items() if name in names or _is_special(name, each))
        kind = Unwatched if isinstance(value, type) and _is_made_by_its_author(value) else Identity
        return _identity(value, kind=kind), *((name, frozen(attributes[name], names, depth - 1, seen)) for name in read)
    parts = next((parts(value) for cls, parts in _PARTS.items() if isinstance(value, cls)), None)
    if parts is not None:
        return tuple(frozen(each, names, depth - 1, seen) for each in parts)
    return _frozen_object(value, names, depth, seen)


def _frozen_collection(value: Any, names: frozenset[str], depth: int, seen: set[Any]) -> Any:
    if len(value) > _MANY:
        return _identity(value, len(value), kind=Unwatched)
    if not isinstance(value, dict):
        kind = tuple if isinstance(value, (list, tuple)) else frozenset
        return kind(frozen(each, names, depth - 1, seen) for each in value)
    return tuple(
        (frozen(key, names) if isinstance(key, _SIMPLE_KEYS) else _identity(key), frozen(each, names, depth - 1, seen))
        for key, each in value.items()
    )


def _frozen_object(value: Any, names: frozenset[str], depth: int, seen: set[Any]) -> Any:
    """The attributes of an object that code may read, and those of its class."""
    cls, inside, is_watched = type(value), {}, isinstance(value, SimpleNamespace)
    with suppress(Exception):  # of an author's `__getattr__`
        inside |= getattr(value, "__dict__", {})
    members = [each for of_class in cls.__mro__ for each in vars(of_class).values()]
    slots = [each for each in members if isinstance(each, MemberDescriptorType)]
    for slot in slots:
        with suppress(AttributeError):  # not set
            inside[slot.__name__] = slot.__get__(value)
    names |= names_read(cls)
    if isinstance(value, nn.Module):  # perhaps one of the layer's modules, which another may replace there: not watched
        inside = {name: each for name, each in inside.items() if name not in OF_EVERY_MODULE} | value._modules
    elif not is_watched:
        is_python_s = (cls.__reduce_ex__, cls.__reduce__) == (object.__reduce_ex__, object.__reduce__)
        is_watched = is_python_s and bool(slots or cls.__dictoffset__ or cls is object)
    if not (is_known(cls) or names & READ_ANY_ATTRIBUTE):
        inside = {name: each for name, each in inside.items() if name in names}
    form = [(name, frozen(each, names, depth - 1, seen)) for name, each in inside.items()]
    if not (is_known(cls) or is_of_a_library(cls)):
        form.append((_identity(cls), *frozen(cls, names, depth, seen)[1:]))  # nobody makes another object
    return _identity(value, kind=Identity if is_watched else Unwatched), *form


def _frozen_function(function: FunctionType, names: frozenset[str], depth: int, seen: set[Any]) -> Any:
    """The name and code of a function, the values that it holds, and those that it reads: together they determine its
    behavior."""
    form = function.__module__, function.__qualname__, _digest(function.__code__)
    if function in seen:
        return form
    seen.add(function)
    held = [("its defaults", each) for each in (function.__defaults__, function.__kwdefaults__, vars(function)) if each]
    held += [(name, value) for (_, name), value in values_read_by(function)]
    if not depth:
        return (*form, _identity(function, kind=Unwatched)) if held else form
    names |= names_in_function(function)
    return *form, *((name, frozen(each, names, depth - 1, seen)) for name, each in held)


@cache
def _digest(code: CodeType) -> str:
    """A hash of a function's code, which is the same in another process."""
    constants = [_digest(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    texts = [sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each) for each in constants]
    return sha256(repr((code.co_code, code.co_names, texts)).encode()).hexdigest()


def is_small(value: Tensor) -> bool:
    """Whether `value` has few elements that can be read without waiting for a device, and memory, which FSDP may
    free."""
    is_ordinary = value.device.type == "cpu" and value.layout == torch.strided and type(value) is Tensor
    return is_ordinary and value.numel() <= 16 and value.untyped_storage().size() > 0


def _is_constant(value: Any) -> bool:
    """Whether nothing inside `value` changes: an object of Python or of a known library."""
    if isinstance(value, (type, ModuleType, FunctionType)):
        return is_of_a_library(value)
    if isinstance(value, _CONSTANT):
        return True
    is_of_them = (type(value).__module__ or "").partition(".")[0] in _WITHOUT_STATE
    return is_of_them and not (_is_array(value) or isinstance(value, nn.Module))


def _is_made_by_its_author(cls: type) -> bool:
    """Whether a forward that makes an object of this class runs a function of its author, which may read anything. A
    module's class is usually named for `super` alone."""
    authors = () if issubclass(cls, nn.Module) else (vars(each) for each in cls.__mro__ if not is_of_a_library(each))
    return any(isinstance(each.get(name), FunctionType) for each in authors for name in ("__init__", "__new__"))


def _is_special(name: str, attribute: Any) -> bool:
    """Whether this is a method such as `__call__`, which code calls without naming it."""
    return name.startswith("__") and isinstance(attribute, FunctionType)


def _is_array(value: Any) -> bool:
    return hasattr(type(value), "__array_interface__")


OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {
    "_conversion",  # added by the conversion itself
    "_engine_plans",  # kept by engine/read.py
    "keep_bottleneck",  # read at every forward
    "_is_replica",  # set by nn.DataParallel
}
_PARTS: dict[type, Any] = {
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    property: lambda value: (value.fget,),
    cached_property: lambda value: (value.func,),
    MethodType: lambda value: (value.__func__, value.__self__),
    partial: lambda value: (value.func, value.args, value.keywords),
    ContextVar: lambda value: (value.get(None),),
}
"""The values that objects of these classes consist of."""
_CONSTANT = (BuiltinFunctionType, GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType)
_CONSTANT += (
    MemberDescriptorType,
    CodeType,
    Enum,
    GenericAlias,
    range,
    slice,
    re.Pattern,
    type(...),
    type(NotImplemented),
)
_WITHOUT_STATE = {"torch", "numpy", "typing", "logging", "operator"}
_SIMPLE_KEYS = (bool, int, float, complex, str, bytes, tuple)
_MANY = 10_000
_SMALL_ARRAY = 1 << 12  # bytes
