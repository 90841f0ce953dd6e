"""The values that methods of authors' classes read outside of their modules: global variables, and values in closures.

A trial verifies a block for these values only, so they are part of its fingerprint, as far as they are simple.
"""

from abc import ABC
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import filterfalse
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Generic, NamedTuple

import torch


class Place(NamedTuple):
    """The place from which a value is read at every forward: the globals of a function, or a cell of its closure.

    `names` are the names in the function's code: if the value is an object, the function may read its attributes with
    these names.
    """

    name: str
    variables: dict[str, Any] | None
    cell: Any
    names: tuple[str, ...]

    def value(self) -> Any:
        if self.variables is not None:
            return self.variables.get(self.name)
        try:
            return self.cell.cell_contents
        except ValueError:  # not set yet
            return None


@cache
def places_outside(cls: type) -> tuple[Place, ...]:
    """The places where methods of `cls` itself, and functions that they call, may read values outside of modules."""
    return _read_by(cls)[0]


@cache
def names_in_methods(cls: type) -> frozenset[str]:
    """The names and string constants in the methods of `cls` itself, and in functions that they call, except in
    `__init__`."""
    return _read_by(cls)[1]


@cache
def names_read(cls: type) -> frozenset[str]:
    """The names and string constants in the methods of an author's class and of its base classes."""
    return frozenset[str]().union(*(map(names_in_methods, filterfalse(is_known, cls.__mro__))))


@cache
def _read_by(cls: type) -> tuple[tuple[Place, ...], frozenset[str]]:
    places: dict[tuple[int, str], Place] = {}
    names = frozenset[str]().union(*(_collect(function, places, depth=3) for function in _functions_of(cls)))
    return tuple(places.values()), names


def modes_asked_for(cls: type) -> frozenset[str]:
    """The modes of torch that the methods of `cls` may ask for, such as "is_grad_enabled"."""
    return frozenset() if is_of_a_library(cls) else names_read(cls) & _MODES


def values_outside(cls: type) -> list[Any]:
    """The values at `places_outside(cls)`, of any kind."""
    return [] if is_known(cls) else [place.value() for place in places_outside(cls)]


def is_known(cls: type) -> bool:
    """Whether this is a class of torch or Python, not of an author. An author's class may have no `__module__`."""
    return cls in (object, ABC, Generic) or (cls.__module__ or "").startswith("torch.nn.modules.")


def names_in(code: CodeType) -> Iterator[str]:
    """The names and string constants in a function's code, and in the code of the functions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from names_in(constant)


def _functions_of(cls: type) -> Iterator[FunctionType]:
    for value in vars(cls).values():
        yield from _functions_in(value)


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions in a class's attribute: a function itself, or inside a property, a classmethod or a wrapper."""
    inner = []
    with suppress(Exception):  # of an author's `__getattr__`
        inner = [getattr(value, name, None) for name in ("__func__", "fget", "__wrapped__")]
    yield from (each for each in (value, *inner) if isinstance(each, FunctionType))


def _collect(function: FunctionType, places: dict[tuple[int, str], Place], depth: int) -> set[str]:
    """Add the places from which a function, or one that it calls, may read; return the names that they use."""
    names = tuple(dict.fromkeys(names_in(function.__code__)))
    found = [Place(name, function.__globals__, None, names) for name in names if name in function.__globals__]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found += [Place(name, None, cell, names) for name, cell in cells]
    code = function.__code__
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    used = {name for each in (inner if function.__name__ == "__init__" else [code]) for name in names_in(each)}
    for place in found:
        value, key = place.value(), (id(place.variables or place.cell), place.name)
        if key in places or (isinstance(value, ModuleType) and is_of_a_library(value)):
            continue
        places[key] = place
        if depth and not is_of_a_library(value):
            for called in _functions_in(value):
                used |= _collect(called, places, depth - 1)
    return used


def is_of_a_library(value: Any) -> bool:
    """Whether this is a module, function, class or object of a known library, which holds no state of an author."""
    if isinstance(value, ModuleType):
        name = value.__name__
    else:
        name = (value if isinstance(value, (type, FunctionType, BuiltinFunctionType)) else type(value)).__module__
    return (name or "").partition(".")[0] in _LIBRARIES


_LIBRARIES = {"torch", "numpy", "math", "functools", "typing", "collections", "warnings", "logging"}
_LIBRARIES |= {"abc", "copy", "copyreg", "dataclasses", "enum", "inspect", "numbers", "operator", "textwrap"}
MODES_RESTORED = {name for name in dir(torch) if "autocast" in name and name.startswith(("get_", "is_"))}
"""The modes in which a recomputation runs as the forward did."""
_MODES = {name for name in dir(torch) if name.startswith(("get_", "is_")) and not hasattr(torch.Tensor, name)}
_MODES -= {"is_tensor", "is_storage"}
