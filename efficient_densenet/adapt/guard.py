"""What the functions of a block name: values that are compared at every forward, since a trace takes them as given.

The code of a function names attributes, global variables and other functions (`co_names`), which are read in turn, with
closures and defaults. A value is compared by a form that holds no module and no tensor and is the same for a copy. A
value without such a form, as of a class written in C, makes the block run its author's forward.
"""

import builtins
import dis
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache, cached_property, partial
from hashlib import sha256
from itertools import zip_longest
from numbers import Number
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from .._mixins import author_class
from ..norms.batch_norm import TORCH_CLASSES


class Constant(NamedTuple):
    """A value whose text says all of it; its class tells 1, 1.0 and True apart."""

    kind: str
    text: str


Named = tuple[str, "str | int", Any]
"""A value that functions name: its name, where it is, and its form; of a module its class and its number."""


class Guard(NamedTuple):
    """All that the functions of a block name, in a form that holds no module and no tensor.

    Attributes:
        names: the names in the code of the functions.
        live: the rates of dropout that may change, each a module's number and an attribute: the trace tries several,
            with different ones in each dropout of a block.
        values: what is named.
        objects: the attributes of modules that are no constants, each with the module's number.
        unknown: why a value cannot be compared, or a recomputation would do something again; or None.
        asks: why the parts of the layers cannot stand for the functions, whatever these compute; or None.
    """

    names: frozenset[str]
    live: frozenset[tuple[int, str]]
    values: tuple[Named, ...]
    objects: tuple[tuple[int, str], ...]
    unknown: str | None
    asks: str | None


def guard_of(
    block: nn.Module,
    ran: Iterable[CodeType] = (),
    names: Iterable[str] = (),
    live: Iterable[tuple[nn.Module, str]] | None = None,
) -> Guard:
    """What the functions of `block` name now. They are those that are named, beginning with `forward`, and those of
    which the code is among `ran`; `names` are further ones, `live` the rates of dropout that may change, by default all
    that are not 0."""
    numbers = {each: i for i, each in reversed(list(enumerate(_modules(block))))}
    rates = ((each, name) for each in numbers for name in drop_rates(each)) if live is None else live
    numbered = frozenset((numbers[each], name) for each, name in rates)
    names = frozenset({"forward", *names})
    while True:
        walk, before = _Walk(block, names, numbered), names
        names = names.union(*map(_names_in, walk.codes))
        if names == before:  # a function that is called without its name, such as __getitem__
            names |= {each.co_name for each in ran if each not in walk.codes}
        if names == before:
            break
    unnamed = next((f"calls {each.co_name}, which it does not name" for each in ran if each not in walk.codes), None)
    mode = next(iter(sorted(names & MODES)), None)
    asks = None if mode is None else f"asks PyTorch for {mode}, of which a trace cannot try every value"
    unknown = walk.unknown or unnamed or (None if names & MODES <= MODES_RESTORED else asks)
    return Guard(names, numbered, tuple(walk.values), tuple(walk.objects), unknown, walk.asks or asks)


def change_since(before: Guard, block: nn.Module) -> str | None:
    """The first change of what the functions of `block` name, such as "scale of a DenseLayer was 1.0 and is 0.5", or
    None."""
    return _first_change(before.values, tuple(_Walk(block, before.names, before.live).values))


def reached_by(guard: Guard, block: nn.Module) -> Sequence[Named]:
    """What the functions of `block` name besides constants that its modules hold, which have not changed."""
    return _Walk(block, guard.names, objects=guard.objects).values


class Snapshot:
    """What functions of these names can reach from a module, with tensors by identity.

    Attributes:
        collection: the description of a list, a set or a dict to which the functions may write, or None.
    """

    def __init__(self, module: nn.Module, names: frozenset[str]) -> None:
        self._module, self._walk = module, _Walk(module, names, by_identity=True)
        self._contents = [(each, _contents(each)) for _, each in self._walk.collections]
        self.collection = next((what for what, _ in self._walk.collections), None)

    def change(self) -> str | None:
        """The first change since, as of `change_since`."""
        return _first_change(self._walk.values, _Walk(self._module, self._walk.names, by_identity=True).values)

    def put_back(self) -> None:
        """Give the collections their contents back, and objects, classes, functions and variables their values: a
        forward that makes a value when it first needs it must not find one that was made of a trace's input."""
        for each, before in self._contents:
            now = _contents(each)
            if len(now) != len(before) or not all(map(is_, now, before)):
                each.clear()
                if isinstance(each, dict):
                    each.update(zip(before[: len(before) // 2], before[len(before) // 2 :], strict=True))
                else:
                    (getattr(each, "extend", None) or each.update)(before)
        for owner, before in self._walk.owners:
            now = _held_by(owner)
            for name in (name for name, value in before.items() if now.get(name, _MISSING) is not value):
                is_new, value = before[name] is _MISSING, before[name]
                if type(owner) is dict:
                    owner.pop(name) if is_new else owner.update({name: value})
                else:  # not setattr, which a frozen dataclass refuses
                    kind: Any = type if isinstance(owner, type) else object
                    kind.__delattr__(owner, name) if is_new else kind.__setattr__(owner, name, value)


def _held_by(owner: Any) -> Mapping[str, Any]:
    """The attributes of an object or a class, the contents of a cell, or the variables of a module of Python."""
    if type(owner) in (dict, CellType):
        return owner if type(owner) is dict else {"cell_contents": owner.cell_contents}
    attributes = (each for cls in _authors(type(owner)) for each in vars(cls).items())
    slots = [name for name, each in attributes if isinstance(each, MemberDescriptorType)]
    held = {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
    return getattr(owner, "__dict__", {}) if not held else {**getattr(owner, "__dict__", {}), **held}


def _contents(collection: Any) -> list[Any]:
    return [*collection, *collection.values()] if isinstance(collection, dict) else [*collection]


def _first_change(before: Sequence[Named], now: Sequence[Named]) -> str | None:
    if before == now:
        return None
    nothing = "", "", None
    old, new = next(each for each in zip_longest(before, now, fillvalue=nothing) if each[0] != each[1])
    if isinstance(old[1], int) and isinstance(new[1], int):
        return "other modules have several names" if old[0] == new[0] else f"a {old[0]} has become a {new[0]}"
    if old[:2] != new[:2]:
        num_before, num_now = (sum(each[:2] == new[:2] for each in values) for values in (before, now))
        return "{} {} was added".format(*new) if num_before < num_now else "{} {} was removed".format(*old)
    texts = [each[2].text for each in (old, new) if isinstance(each[2], Constant)]
    return " ".join(map(str, old[:2])) + (" was {} and is {}".format(*texts) if len(texts) == 2 else " has changed")


def plain_attributes(block: nn.Module) -> tuple[tuple[tuple[str, bool | int | float | str], ...], ...]:
    """The names and values of the numbers, flags and strings that each author's module in `block` holds."""
    return tuple(
        tuple((name, value) for name, value in vars(module).items() if isinstance(value, (bool, int, float, str)))
        if not is_of_a_library(class_as_written(type(module)))
        else ()
        for module in block.modules()
    )


def holds_attributes(block: nn.Module, attributes: tuple[tuple[tuple[str, Any], ...], ...]) -> bool:
    """Whether `attributes` equal `plain_attributes(block)`. A compiler that traces this recompiles when one changes."""
    pairs = zip(block.modules(), attributes, strict=True)
    return all(getattr(module, name) == value for module, values in pairs for name, value in values)


class _Walk:
    """One pass over the modules of a block, and over all that functions name.

    Attributes:
        names, values, objects, unknown, asks: as in `Guard`.
        codes: the code of the functions, and of those inside.
        collections: the lists, sets and dicts that functions may write to, each with a description.
        owners: all else that they may write to, each with the values of what they name.
    """

    def __init__(
        self,
        block: nn.Module,
        names: frozenset[str],
        live: frozenset[tuple[int, str]] = frozenset(),
        by_identity: bool = False,
        objects: Iterable[tuple[int, str]] | None = None,
    ) -> None:
        self.names, self._live, self._by_identity = names, live, by_identity
        self._reads_any, self._attributes = not names.isdisjoint(_READ_ANY), names - OF_EVERY_MODULE
        self._reads_training, self._flags = "training" in names, dict[str, bool]()
        self.values: list[Named] = []
        self.objects: list[tuple[int, str]] = []
        self.codes: set[CodeType] = set()
        self.collections: list[tuple[str, Any]] = []
        self.owners: list[tuple[Any, dict[str, Any]]] = []
        self.unknown: str | None = None
        self.asks: str | None = None
        self._pending: list[Any] = []  # classes, modules of Python and functions, each once
        self._seen: dict[int, tuple[int | str, Any]] = {}  # kept, so that no other object gets the identity of one
        modules = list(_modules(block))
        for i, module in enumerate(modules):
            self._seen.setdefault(id(module), (i, module))
        try:
            if objects is None:
                for i, module in enumerate(modules):
                    self._see_module(module, i)
                others, norms, dropouts = (self._flags.get(each, block.training) for each in ("", "norms", "dropouts"))
                self.values.append(("training", "of its modules", (others, norms, dropouts) in TRACED_FLAGS))
            else:
                self.values += [(name, i, self._form(name, vars(modules[i])[name])) for i, name in objects]
                self._pend(*(cls for kind in dict.fromkeys(map(type, modules)) for cls in _kind_of(kind).authors))
            for each in self._pending:  # which grows
                self._see_owner(each)
        except Exception as exc:  # of an author's object, such as one without a hash
            self._refuse(f"has code or values that cannot be read ({type(exc).__name__}: {exc})")

    def _refuse(self, what: str) -> None:
        self.unknown = self.unknown or what

    def _pend(self, *owners: Any) -> None:
        for each in owners:
            if id(each) not in self._seen:
                self._seen[id(each)] = f"{getattr(each, '__module__', None)}.{_name_of(each)}", each
                self._pending.append(each)

    def _see_values(self, owner: Any, names: Iterable[str]) -> None:
        if self._by_identity:
            held = _held_by(owner)
            self.owners.append((owner, {each: held.get(each, _MISSING) for each in names}))

    def _named(self, held: Any) -> list[str]:
        """The names of those that a function may read, of the names that are held."""
        return [each for each in held if each not in OF_EVERY_MODULE] if self._reads_any else sorted(self.names & held)

    def _see_module(self, module: nn.Module, i: int) -> None:
        kind, held, number, values = _kind_of(type(module)), vars(module), self._seen[id(module)][0], self.values
        parameters = {**module._parameters, **held.get("_former_parameters", {})}  # of a replica of nn.DataParallel
        values.append((kind.name, number, None))
        if kind.is_script:
            self._refuse("holds a ScriptModule, whose code is not Python's")
        if module._modules:
            values.append(("modules", kind.where, tuple(module._modules)))
        if self._reads_training:
            training = self._flags.setdefault(kind.group, module.training)
            values.append(("training, beside the others',", kind.where, module.training is training))
        own = ["p", "inplace"] if kind.is_dropout else []
        if self._reads_any or not self._attributes.isdisjoint(held):
            own += [each for each in self._named(held.keys()) if not (each in OF_EVERY_MODULE or each in parameters)]
        for name in dict.fromkeys(own):
            is_live = (number, name) in self._live and is_drop_rate(kind.is_dropout, name, held[name])
            form = "any rate" if is_live else self._form(f"{name} {kind.where}", held[name])
            values.append((name, kind.where, form))
            self.objects += [] if is_live or isinstance(form, Constant) else [(i, name)]
        for tensors in (parameters, module._buffers):
            named = [] if kind.of_torch and self.names.isdisjoint(tensors) else self._named(tensors.keys())
            if kind.of_torch and not _TENSORS.issuperset(tensors):  # such as weight_orig, which computes the weight
                named += [each for each in tensors if each not in _TENSORS]
            values.extend((each, kind.where, "no tensor" if tensors[each] is None else "a tensor") for each in named)
        if kind.authors:
            self._pend(*kind.authors)

    def _see_owner(self, owner: Any) -> None:
        """See the named attributes of a class, a module of Python or a function, and all that a function names."""
        held, name = vars(owner), _name_of(owner)
        self._see_values(owner, self.names)
        where = f"of a {name}" if isinstance(owner, type) else f"of {name}"
        for each in self._named(held.keys()) if held else ():
            if each in self.names or not each.startswith("__"):
                self.values.append((each, where, self._form(f"{each} {where}", held[each])))
        if not isinstance(owner, FunctionType):
            return
        code, variables = owner.__code__, owner.__globals__
        self.codes |= set(_codes_in(code))
        self._see_values(variables, _names_in(code))
        found = {each: variables.get(each, vars(builtins).get(each, _MISSING)) for each in _names_in(code)}
        found = {each: value for each, value in found.items() if value is not _MISSING}
        for each, cell in zip(code.co_freevars, owner.__closure__ or (), strict=True):
            with suppress(ValueError):  # not set yet
                found[each] = cell.cell_contents
                self._see_values(cell, ("cell_contents",))
        found |= {"a default": (owner.__defaults__, owner.__kwdefaults__)}
        self.values.append(("the code", where, digest_of(code)))
        for each in sorted(found):
            self.values.append((each, f"in {name}", self._form(f"{each} in {name}", found[each])))

    def _form(self, what: str, value: Any) -> Any:
        """A form of `value` to be compared later: equal forms mean equivalent values."""
        kind = type(value)
        authors = _authors(kind)
        if kind in _CONSTANTS or (issubclass(kind, (Number, Enum)) and not authors):
            return Constant(kind.__name__, repr(value))
        if isinstance(value, Tensor):
            self._seen.setdefault(id(value), ("a tensor", value))
            return ("a tensor", id(value)) if self._by_identity else "a tensor"
        if id(value) in self._seen:
            return self._seen[id(value)][0]
        if isinstance(value, torch.jit.ScriptFunction):
            self.asks = self.asks or f"calls {_name_of(value)}, a function of TorchScript, in which no request is seen"
            return kind.__name__, value.code
        if _is_constant(value):
            return f"{getattr(value, '__module__', None)}.{_name_of(value)}"
        if _authors_of(value) or (issubclass(kind, (FunctionType, ModuleType)) and is_of_authors(_origin(value))):
            self._pend(value, *authors, *_authors_of(value))
            return self._seen[id(value)][0]
        self._seen[id(value)] = f"value {len(self._seen)}", value
        self._pend(*authors)
        # An author's class adds attributes to what the class of Python holds from which it is derived.
        base = next(cls for cls in kind.__mro__ if cls not in authors and cls.__module__ not in _WITHOUT_VALUES)
        inside: dict[Any, Any] = {}
        if isinstance(value, nn.Module):
            if any(True for _ in (*value.parameters(), *value.buffers())):
                self._refuse(f"reads {what}, a {kind.__name__} with tensors that is not inside")
            self._pend(*(cls for each in value.modules() for cls in _authors(type(each))))
            inside = {name: each for name, each in vars(value).items() if each or name not in OF_EVERY_MODULE}
        elif isinstance(value, Enum):
            inside = {"its value": (value.name, value.value)}
        elif issubclass(base, (list, tuple, dict, set, frozenset, deque)) and len(value) <= _MANY:
            if not isinstance(value, (tuple, frozenset)):
                self.collections.append((what, value))
            items = value.items() if isinstance(value, dict) else value
            inside = dict(enumerate(sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items))
        elif issubclass(base, tuple(_INSIDE)):
            names = next(names for cls, names in _INSIDE.items() if isinstance(value, cls))
            inside = {name: getattr(value, name) for name in names}
        elif base in _TEXTS:
            inside = {"its value": base.__repr__(value)}
        elif not (base in _NAMESPACES or (authors and base is object and not issubclass(kind, type))):
            self._refuse(f"reads {what}, a {kind.__name__}, whose changes would go unnoticed")
            return kind.__name__
        if authors or base in _NAMESPACES:
            held = _held_by(value)
            self._see_values(value, self.names)
            inside |= {f".{name}": held[name] for name in self._named(held.keys())}
        return kind.__name__, *((name, self._form(what, each)) for name, each in inside.items())


class _Kind(NamedTuple):
    """What a class says of its modules; those of one group are in one training mode in a trace."""

    name: str
    where: str
    authors: tuple[type, ...]
    of_torch: bool
    is_dropout: bool
    group: str
    is_script: bool


@cache
def _kind_of(cls: type[nn.Module]) -> _Kind:
    cls = class_as_written(cls)
    name, is_dropout = "BatchNorm" if cls in _BATCH_NORMS else cls.__name__, issubclass(cls, _DropoutNd)
    group = "dropouts" if is_dropout else "norms" if issubclass(cls, _NormBase) else ""
    is_script = issubclass(cls, torch.jit.ScriptModule)
    return _Kind(name, f"of a {name}", _authors(cls), is_of_a_library(cls), is_dropout, group, is_script)


def class_as_written(cls: type[nn.Module]) -> type[nn.Module]:
    """The class as its author wrote it: torch's class for norms under the exactly-once rule."""
    cls = author_class(cls)
    return TORCH_CLASSES.get(cls, cls)


def _origin(value: Any) -> str | None:
    """The name of the module where a function, a class or an object is from, or of a module itself."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType):  # `functools.wraps` gives an author's function another module
        return value.__globals__.get("__name__")
    if isinstance(value, BuiltinFunctionType) and value.__module__ is None:  # of torch, or a method of some object
        return getattr(value.__self__, "__module__", None)
    return getattr(value, "__module__", None)


def is_of_a_library(value: Any) -> bool:
    """Whether this is of a library that holds no state of an author."""
    return f"{_origin(value)}.".startswith(LIBRARIES) and not f"{_origin(value)}.".startswith(_STATEFUL)


def _is_constant(value: Any) -> bool:
    """Whether everything is known of this, as of a library's function, class or module."""
    if isinstance(value, _DESCRIPTORS):
        return True
    if value.__class__ in (type, BuiltinFunctionType) and value.__module__ == "builtins" and not _authors_of(value):
        return value in BUILTINS
    return isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType)) and is_of_a_library(value)


def _authors_of(value: Any) -> tuple[type, ...]:
    return _authors(value) if isinstance(value, type) else ()


@cache
def is_of_authors(name: str | None) -> bool:
    """Whether a module of this name is an author's; notebooks and code generators may give none."""
    of_libraries = f"{name}.".startswith((*LIBRARIES, "namedtuple_"))
    return (name or "").partition(".")[0] not in _NOT_OF_AUTHORS and not of_libraries


@cache
def _authors(cls: type) -> tuple[type, ...]:
    """The classes of authors of which a class is derived."""
    return tuple(
        each
        for each in cls.__mro__
        if each.__flags__ & _HEAP_TYPE and (each.__module__ == "builtins" or is_of_authors(each.__module__))
    )


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """Like `module.modules()`, but several times as fast."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)


def drop_rates(module: nn.Module) -> list[str]:
    """The names of the attributes of `module` that are rates of dropout, and not 0."""
    kind = _kind_of(type(module))
    held = vars(module) if kind.is_dropout or not kind.of_torch else {}
    return [name for name, value in held.items() if is_drop_rate(kind.is_dropout, name, value) and value]


def is_drop_rate(of_dropout: bool, name: str, value: Any) -> bool:
    return type(value) is float and (name == "p" if of_dropout else "drop" in name) and 0 <= value <= 1


def settings_of(block: nn.Module) -> set[str]:
    """The names of the settings of torch's modules without tensors, such as activations and poolings."""
    of_torch = (each for each in _modules(block) if is_of_a_library(type(each)) and not each._parameters)
    return {name for each in of_torch for name in vars(each)} - OF_EVERY_MODULE


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__


@cache
def _codes_in(code: CodeType) -> tuple[CodeType, ...]:
    """The code of a function and of the functions inside."""
    return code, *(each for inner in code.co_consts if isinstance(inner, CodeType) for each in _codes_in(inner))


@cache
def _names_in(code: CodeType) -> frozenset[str]:
    matches = any(_MATCH_CLASS in each.co_code[::2] for each in _codes_in(code))  # names the attributes by texts
    names = {name for each in _codes_in(code) for name in each.co_names}
    return frozenset(names | {"__getattribute__"} if matches else names)


@cache
def digest_of(code: CodeType) -> bytes:
    """A hash of a function's code, which is the same in another process."""
    constants = [digest_of(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    texts = [sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each) for each in constants]
    return sha256(repr((code.co_code, code.co_names, texts)).encode()).digest()


TRACED_FLAGS = {(True, True, True), (False, False, False), (False, False, True), (True, False, True)}
"""The training modes of a trace: of all modules but norms and dropouts, of norms, and of dropouts."""
_TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
_MISSING, _MANY, _HEAP_TYPE = object(), 1000, 1 << 9  # the flag of classes that are made at run time
_CONSTANTS = {str, bytes, type(None), type(...), type(NotImplemented), slice, range}
_CONSTANTS |= {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
_TEXTS, _NAMESPACES = (int, float, complex, str, bytes), (SimpleNamespace, Namespace, partial)
_WITHOUT_VALUES = "abc", "enum", "typing", "collections.abc"
"""Modules of classes that add no values of their own to those that are derived from them."""
_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
_INSIDE = {
    property: ("fget",),
    cached_property: ("func",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    MethodType: ("__func__", "__self__"),
    partial: ("func", "args", "keywords"),
}
"""Objects that consist of functions and values, with their names."""
_DESCRIPTORS = MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType, MemberDescriptorType
_DESCRIPTORS += (type(Constant.kind),)
"""Attributes of classes in C, of slots and of named tuples, which hold nothing themselves."""
_READ_ANY = {"getattr", "hasattr", "vars", "dir", "attrgetter", "methodcaller", "__getattribute__", "__getattr__"}
_READ_ANY |= {"__dict__", "format", "format_map"}
"""Names of functions that read attributes of which the names are computed."""
LIBRARIES = (f"{__name__.partition('.')[0]}.", "torch.", "torchvision.ops.", "torchvision.utils.", "math.", "typing.")
LIBRARIES += ("einops.", "itertools.", "operator.", "__future__.", "functools.", "collections.", "_functools.")
LIBRARIES += ("_operator.", "_collections.", "abc.", "typing_extensions.")
_STATEFUL = ("torch.backends.", "torch.distributed.", "torch.random.", "torch.utils.data.")
_NOT_OF_AUTHORS = {*sys.stdlib_module_names, "torch", "numpy", __name__.partition(".")[0]} - {"__main__"}
BUILTINS = {abs, all, any, bool, dict, divmod, enumerate, filter, float, frozenset, getattr, hasattr, int, isinstance}
BUILTINS |= {issubclass, iter, len, list, map, max, min, next, object, pow, range, repr, reversed, round, set, slice}
BUILTINS |= {callable, sorted, str, sum, super, tuple, type, zip, property, staticmethod, classmethod, vars, dir}
BUILTINS |= {setattr, delattr, complex, bytes, format, chr, ord, print}
BUILTINS |= {each for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, Exception)}
MODES_RESTORED = {name for name in dir(torch) if "autocast" in name and name.startswith(("get_", "is_"))}
"""The modes in which a recomputation runs as the forward did."""
MODES = {name for name in dir(torch) if name.startswith(("get_", "is_", "are_", "set_")) and not hasattr(Tensor, name)}
MODES -= {"is_tensor", "is_storage"}
MODES |= {"manual_seed", "seed", "initial_seed", "load", "save", "use_deterministic_algorithms", "backends"}
MODES |= {name for name in dir(torch.cuda) if name.startswith(("current_", "mem", "max_mem", "get_", "is_current"))}
MODES |= {"_C", "distributed", "grad", "set_", "requires_grad_", "share_memory_", "data_ptr", "retain_grad"}
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {
    "_conversion",  # added by the conversion itself
    "_conversion_report",
    "_engine_plans",  # kept by engine/plan.py
    "keep_bottleneck",  # read at every forward
    "_is_replica",  # set by nn.DataParallel
    "_former_parameters",
}
_BATCH_NORMS = set(TORCH_CLASSES.values())
"""One of them may become another, as by `convert_sync_batchnorm`: engines read which it is at every forward."""
