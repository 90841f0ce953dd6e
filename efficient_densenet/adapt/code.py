"""The code of forwards: the values that it reads besides its input, and why it may compute something else next time.

A trace verifies a block with the values that its forwards read then. So conversion takes code only in which every name
is known to stand for a function, a module, a tensor of a module, or a constant: a number, a string, or a collection of
these. Constants are compared at every forward. Whatever else a forward reads (an object, a file, a generator of random
numbers) may change unnoticed, and a forward that writes to anything but its own variables would do so again in a
recomputation: such blocks run their author's forward.
"""

import builtins
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..norms.frozen import is_frozen_batch_norm
from .instructions import READS_ANY, Loads, digest_of, loads_of
from .known import (
    ATTRIBUTES,
    BUILTINS,
    MODES,
    MODES_RESTORED,
    OF_EVERY_MODULE,
    WHERE_MADE,
    class_as_written,
    is_known,
    is_of_a_library,
)


class DropRate(NamedTuple):
    """A probability of dropout. If it was not 0 in the trace, any other probability is verified too: the trace tries
    several, with different ones in each dropout of a block."""

    value: float


class Number(NamedTuple):
    """A number; its text tells 1, 1.0 and True apart."""

    value: bool | int | float | complex
    text: str


class Code:
    """What the code of some modules reads.

    Attributes:
        names: the attributes that it reads, of any objects.
        values: the constants that it reads of each module, by name.
        outside: the code of each function, and the constants that it reads elsewhere, each with a description.
        unknown: why it may read what nobody compares, or do what a recomputation would do again; or None.
        by_parts: why the parts of the layers cannot stand for it, since it reads their tensors itself; or None.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.names: set[str] = set()
        self.values: list[dict[str, Any]] = [{} for _ in modules]
        self.outside: list[tuple[str, Any]] = []
        self.unknown: str | None = None
        self.by_parts: str | None = None
        self._modules = modules
        classes = dict.fromkeys(each for cls in dict.fromkeys(map(class_as_written, modules)) for each in cls.__mro__)
        self._authors = [cls for cls in classes if not is_known(cls)]
        self._known = [cls for cls in classes if is_known(cls) and cls is not nn.Module]
        self._norms = [class_as_written(each) for each in modules if _is_norm(each)]
        self._seen: dict[FunctionType, Loads] = {}
        self._reads_any = False
        self._held: list[tuple[nn.Module, str]] = []
        self._owners: list[Any] = []
        self._collections: list[tuple[str, str]] = []
        self._of_norms: set[FunctionType] = set()
        self._pending = ["forward"]
        try:
            self._read()
        except Exception as exc:  # of an author's object, such as one without a hash
            self._refuse(f"has code or values that cannot be read ({type(exc).__name__}: {exc})")

    def _read(self) -> None:
        if any(isinstance(each, torch.jit.ScriptModule) for each in self._modules):
            self._refuse("holds a ScriptModule, whose code is not Python's")
            return
        of_torch = {name for cls in self._known for method in _CALL_OTHERS for name in _names_in(cls, method)}
        for cls in self._authors:
            for name, each in vars(cls).items():
                self._pending += [name] if name in of_torch or _is_called_unnamed(name, each) else []
        num_names = -1
        while num_names < len(self.names):
            num_names = len(self.names)
            while self._pending:
                self._resolve(self._pending.pop())
            names = frozenset(self.names)
            for module, values in zip(self._modules, self.values, strict=True):
                for name in _names_held(tuple(vars(module)), names):
                    if name not in _parameters(module):
                        values[name] = self._see_held(module, name)
        self._check()

    def _resolve(self, name: str) -> None:
        """See what the attributes of this name may be, of classes and of modules of Python."""
        if name not in self.names:
            self.names.add(name)
            if name in MODES:
                self._refuse(
                    f"asks PyTorch for {name}, of which a trace cannot try every value", name in MODES_RESTORED
                )
            for owner in (*self._authors, *self._owners):
                if name in vars(owner):
                    self._see_attribute(owner, name)

    def _see_held(self, module: nn.Module, name: str) -> Any:
        """See an attribute of a module."""
        value = vars(module)[name]
        if isinstance(value, Tensor):
            self._held.append((module, name))
            return "a tensor"
        if type(value) in _CHANGEABLE:
            self._held.append((module, name))
        return DropRate(value) if is_drop_rate(name, value) else self._see(_described(module, name), value)

    def _see_attribute(self, owner: Any, name: str) -> None:
        """See an attribute of an author's class or function, of a module of Python, or of a namespace."""
        is_class = isinstance(owner, type)
        what = f"{name} of a {owner.__name__}" if is_class else f"{name} of {_name_of(owner)}"
        of_norm = is_class and any(issubclass(each, owner) for each in self._norms)
        self.outside.append((what, self._see(what, vars(owner)[name], of_norm, is_method=is_class)))
        self._collections += [(name, what)] if type(vars(owner)[name]) in _CHANGEABLE else []

    def _see(self, what: str, value: Any, of_norm: bool = False, is_method: bool = False) -> Any:
        """A form of `value` to be compared later: equal forms mean equivalent values."""
        if type(value) in _NUMBERS:
            return Number(value, repr(value))
        if value is getattr or value is hasattr:
            self._see_any()
        if type(value) in _CONSTANTS:
            return value
        if type(value) in _COLLECTIONS and len(value) <= _MANY:
            inside = value.items() if isinstance(value, dict) else value
            inside = sorted(inside, key=repr) if isinstance(value, (set, frozenset)) else inside
            return type(value).__name__, *(self._see(what, each) for each in inside)
        if type(value) is partial:
            return "partial", *(self._see(what, each) for each in (value.func, value.args, value.keywords))
        if type(value) in _NAMESPACES or (isinstance(value, ModuleType) and not is_of_a_library(value)):
            self._see_owner(value)
            return _name_of(value)
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            self._see_owner(value)
        members = _functions_of(value)
        for function in members:
            self._visit(function, of_norm, is_method)
        if not (members or self._is_constant(value)):
            self._refuse(f"reads {what}, a {type(value).__name__}, whose changes would go unnoticed")
        return f"{getattr(value, '__module__', None)}.{_name_of(value)}", *(
            digest_of(each.__code__) for each in members
        )

    def _see_owner(self, owner: Any) -> None:
        if not any(owner is each for each in self._owners):
            self._owners.append(owner)
            for name in sorted(self.names & vars(owner).keys()):
                self._see_attribute(owner, name)

    def _is_constant(self, value: Any) -> bool:
        """Whether this is a class, a function or a library's module, of which everything is known."""
        if isinstance(value, type) and not is_known(value):
            return value in self._authors or value in BUILTINS or is_of_a_library(value)
        if isinstance(value, BuiltinFunctionType) and value.__module__ == "builtins":
            return value in BUILTINS
        return isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType)) and is_of_a_library(value)

    def _visit(self, function: FunctionType, of_norm: bool, is_method: bool) -> None:
        """See what a function of an author reads."""
        if function in self._seen:
            return
        loads = self._seen[function] = loads_of(function.__code__)
        self._of_norms |= {function} if of_norm else set()
        name = function.__qualname__
        if loads.writes or not loads.variables_of_closures.isdisjoint(function.__code__.co_freevars):
            self._refuse(f"{loads.writes or 'writes to a variable outside'} in {name}")
        if vars(function):
            self._see_owner(function)
        if loads.asks_for_modes or ("training" in loads.attributes and not is_method):
            self._refuse(f"reads training of another module in {name}", is_repeatable=True)
        self.outside.append((f"the code of {name}", digest_of(function.__code__)))
        held = [("a default", function.__defaults__), ("a default", function.__kwdefaults__)]
        held += [(each, function.__globals__.get(each, vars(builtins).get(each))) for each in loads.variables]
        for each, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not set yet
                held += [(each, cell.cell_contents)] if each != "__class__" else []
        for each, value in held:
            what = f"{each} in {name}"
            is_class = each in loads.values and any(value is cls for cls in self._authors)
            if is_class and _ASKS_FOR_CLASSES.isdisjoint(loads.variables):
                self._refuse(f"may make a {each} in {name}")
            if loads.changes and type(value) in _CHANGEABLE:
                self._refuse(f"may change {what}")
            self.outside.append((what, self._see(what, value, of_norm)))
        self._pending += sorted(loads.attributes)
        if loads.attributes & READS_ANY:
            self._see_any()

    def _see_any(self) -> None:
        """See all attributes, of which code may read any, such as by `getattr`."""
        if not self._reads_any:
            self._reads_any = True
            for module in self._modules:
                self._pending += (name for name in vars(module) if name not in OF_EVERY_MODULE)
                self._pending += (*module._parameters, *module._buffers)
            for cls in self._authors:
                self._pending += (name for name in vars(cls) if not name.startswith("__"))

    def _check(self) -> None:
        """Refuse code that reads attributes of which nothing is known; or tensors of modules, except norms that read
        their own; or that may change a tensor or a collection that lives longer than the forward."""
        for name in sorted(self.names - ATTRIBUTES):
            may_be_absent = self._reads_any and not name.startswith("_")  # code asks `hasattr`
            if not (may_be_absent or self._is_known(name)):
                self._refuse(f"reads {name} of an object, of which nothing is known")
        for name, what in self._collections:
            if any(each.changes and name in each.attributes for each in self._seen.values()):
                self._refuse(f"reads {what}, which a forward may change")
        outside = [loads for function, loads in self._seen.items() if function not in self._of_norms]
        for module in self._modules:
            for tensors in (_parameters(module), module._buffers):
                self._held += [(module, name) for name in tensors if name in self.names]
        for module, name in self._held:
            readers = [loads for loads in outside if name in loads.attributes]
            is_tensor = type(vars(module).get(name)) not in _CHANGEABLE
            if name in _parameters(module):
                updates = False
            elif is_tensor:  # perhaps by another function, to which it is passed
                is_of_norm = _is_norm(module) and name in module._buffers
                updates = bool(readers) if is_of_norm else any(each.changes_tensors for each in self._seen.values())
            else:
                updates = any(each.changes for each in readers)
            if updates:
                self._refuse(f"reads {_described(module, name)}, which a forward may change")
            elif is_tensor and (readers or (self._reads_any and not is_known(class_as_written(module)))):
                self._refuse(f"reads {_described(module, name)}", is_repeatable=True)

    def _is_known(self, name: str) -> bool:
        """Whether an attribute of this name is one that is seen: of a class, or of a module."""
        return (
            any(name in vars(owner) for owner in (*self._authors, *self._owners))
            or any(isinstance(vars(cls).get(name), FunctionType) for cls in self._known)
            or any(name in held for module in self._modules for held in _dicts_of(module))
        )

    def _refuse(self, what: str, is_repeatable: bool = False) -> None:
        self.by_parts = self.by_parts or f"found that it {what}"
        if not is_repeatable:
            self.unknown = self.unknown or f"found that it {what}"


def _is_norm(module: nn.Module) -> bool:
    """Whether this is a norm whose tensors the engines read as its forward does."""
    return isinstance(module, _NormBase) or is_frozen_batch_norm(module)


def _names_in(cls: type, name: str) -> frozenset[str]:
    """The attributes that a method of one of torch's classes reads, which an author's class may replace."""
    method = vars(cls).get(name)
    return loads_of(method.__code__).attributes | {name} if isinstance(method, FunctionType) else frozenset()


def _parameters(module: nn.Module) -> Collection[str]:
    """The names of a module's parameters; a replica of nn.DataParallel holds them as attributes."""
    former = vars(module).get("_former_parameters")
    return module._parameters if former is None else {**module._parameters, **former}


def _dicts_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._modules, module._parameters, module._buffers


def _described(module: nn.Module, name: str) -> str:
    return f"{name} of a {class_as_written(module).__name__}"


@lru_cache(maxsize=10_000)
def _names_held(held: tuple[str, ...], names: frozenset[str]) -> tuple[str, ...]:
    """The attributes of a module that code reads, of those that it holds."""
    return tuple(name for name in held if name in names and name not in OF_EVERY_MODULE)


def _functions_of(value: Any) -> list[FunctionType]:
    """The author's functions that a value consists of: a function itself, or inside a property, a static method or a
    `torch.autograd.Function`."""
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        return [
            each for name in ("forward", "backward", "setup_context") for each in _functions_of(vars(value).get(name))
        ]
    inner = [value.fget] if type(value) is property else [value.__func__] if type(value) in _METHODS else [value]
    return [each for each in inner if isinstance(each, FunctionType) and not is_of_a_library(each)]


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__


def _is_called_unnamed(name: str, attribute: Any) -> bool:
    """Whether this is a method such as `__getitem__`, which code calls without naming it."""
    is_method = isinstance(attribute, FunctionType) or (callable(attribute) and not isinstance(attribute, type))
    is_called = name.startswith("__") or name in ("_call_impl", "_wrapped_call_impl")
    return is_called and name not in WHERE_MADE and (is_method or name == "__call__")


def is_drop_rate(name: str, value: Any) -> bool:
    return type(value) is float and "drop" in name and 0 <= value <= 1


_NUMBERS = {bool, int, float, complex}
_CONSTANTS = {str, bytes, type(None), type(...), type(NotImplemented), slice, range}
_CONSTANTS |= {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
_COLLECTIONS = {list, tuple, dict, set, frozenset, OrderedDict}
_CHANGEABLE = {list, dict, set, OrderedDict}
_NAMESPACES = {SimpleNamespace, Namespace}
_MANY = 1000
_METHODS = (staticmethod, classmethod)
_CALL_OTHERS = ("forward", "_conv_forward")
"""Methods of torch's classes that call others, which an author's class may replace."""
_ASKS_FOR_CLASSES = {"isinstance", "issubclass", "type"}
