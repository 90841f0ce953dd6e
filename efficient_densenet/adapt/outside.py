"""The values that methods of authors' classes read outside of their modules: global variables, and values in closures.

A trial verifies a block for these values only, so they are part of its fingerprint, as far as they are simple.
"""

import builtins
import dis
import sys
import weakref
from abc import ABC
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import filterfalse
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Generic

import torch


@cache
def names_in_methods(cls: type) -> frozenset[str]:
    """The names and string constants in the methods of `cls` itself, and in functions that they call, except in
    `__init__`."""
    return frozenset[str]().union(*(_collect(function, {}, depth=3) for function in _functions_of(cls)))


@cache
def names_read(cls: type) -> frozenset[str]:
    """The names and string constants in the methods of an author's class and of its base classes."""
    return frozenset[str]().union(*(map(names_in_methods, filterfalse(is_known, cls.__mro__))))


def names_in_function(function: FunctionType) -> frozenset[str]:
    """The names and string constants in a function, and in functions that it calls."""
    if function not in _names:
        _names[function] = frozenset(_collect(function, {}, depth=3))
    return _names[function]


def modes_asked_for(cls: type) -> frozenset[str]:
    """The modes of torch that the methods of `cls` may ask for, such as "is_grad_enabled"."""
    return frozenset() if is_of_a_library(cls) else names_read(cls) & _MODES


def values_outside(cls: type) -> list[Any]:
    """The values that methods of `cls` itself, and functions that they call, may read outside of modules."""
    read: dict[tuple[int, str], Any] = {}
    for function in [] if is_known(cls) else _functions_of(cls):
        _collect(function, read, depth=3)
    return list(read.values())


def attributes_of_class(cls: type) -> dict[str, Any]:
    """The attributes of an author's class and of its base classes, except what runs only where an object is made."""
    authors = (each for each in reversed(cls.__mro__) if not is_known(each))
    return {name: value for each in authors for name, value in vars(each).items() if name not in _WHERE_MADE}


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


def _collect(function: FunctionType, read: dict[tuple[int, str], Any], depth: int) -> set[str]:
    """Add to `read` the values that a function, or one that it calls, may read; return the names that they use."""
    used = {name for code in _codes(function) for name in names_in(code)}
    for variable, value in values_read_by(function):
        if variable in read:
            continue
        read[variable] = value
        if depth and not is_of_a_library(value):
            attributes = vars(value) if isinstance(value, ModuleType) else {}
            for each in (value, *(attributes[name] for name in used & attributes.keys())):
                for called in _functions_in(each):
                    used |= _collect(called, read, depth - 1)
    return used


def values_read_by(function: FunctionType) -> Iterator[tuple[tuple[int, str], Any]]:
    """The values that a function itself may read outside, each with what identifies its variable: global variables,
    modules that it imports, and cells of its closure."""
    variables = function.__globals__
    for code in _codes(function):
        for name in _loaded_by(code, "LOAD_GLOBAL"):
            value = variables.get(name, _BUILTINS.get(name))
            if not (name not in variables and name in _BUILTINS and value not in READ_ANYTHING):
                yield (id(variables), name), value
        for name in _loaded_by(code, "IMPORT_NAME"):
            module = sys.modules.get(name) or sys.modules.get(f"{variables.get('__package__')}.{name}".rstrip("."))
            yield (id(sys.modules), name), module
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            with suppress(ValueError):  # not set yet
                yield (id(cell), name), cell.cell_contents


def _codes(function: FunctionType) -> list[CodeType]:
    """The code of a function; of `__init__`, that of the functions inside, which may run later."""
    code = function.__code__
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return inner if function.__name__ == "__init__" else [code]


@cache
def _loaded_by(code: CodeType, instruction: str) -> tuple[str, ...]:
    """The names that such instructions of a function's code load, and of the functions inside."""
    names = {str(each.argval) for each in dis.get_instructions(code) if each.opname == instruction}
    inner = (_loaded_by(each, instruction) for each in code.co_consts if isinstance(each, CodeType))
    return tuple(sorted(names.union(*inner)))


def is_of_a_library(value: Any) -> bool:
    """Whether this is a module, function, class or object of a known library, which holds no state of an author."""
    if isinstance(value, ModuleType):
        name = value.__name__
    else:
        name = (value if isinstance(value, (type, FunctionType, BuiltinFunctionType)) else type(value)).__module__
    library = (name or "").partition(".")[0]
    return library in _LIBRARIES or (library in _OF_PYTHON and not isinstance(value, ModuleType))


_LIBRARIES = {
    __name__.partition(".")[0],
    "torch",
    "numpy",
    "math",
    "functools",
    "typing",
    "collections",
    "warnings",
    "logging",
}
_LIBRARIES |= {"abc", "copy", "copyreg", "dataclasses", "enum", "inspect", "numbers", "operator", "textwrap"}
MODES_RESTORED = {name for name in dir(torch) if "autocast" in name and name.startswith(("get_", "is_"))}
"""The modes in which a recomputation runs as the forward did."""
_MODES = {name for name in dir(torch) if name.startswith(("get_", "is_")) and not hasattr(torch.Tensor, name)}
_MODES -= {"is_tensor", "is_storage"}
_OF_PYTHON = sys.stdlib_module_names - {"builtins", "__main__"}
_WHERE_MADE = {"__init__", "__new__", "__post_init__", "__repr__", "__init_subclass__"}
READ_ANYTHING = (globals, eval, exec, __import__, sys._getframe)
"""Functions by which code reads values whose names it does not say."""
READ_ANY_ATTRIBUTE = frozenset({"getattr", "vars", "__dict__"})
_BUILTINS = vars(builtins)
_names: weakref.WeakKeyDictionary[FunctionType, frozenset[str]] = weakref.WeakKeyDictionary()
