"""The instructions of functions: the names that they load, and what they write to."""

import dis
from functools import cache
from hashlib import sha256
from itertools import pairwise
from types import CodeType
from typing import NamedTuple


class Loads(NamedTuple):
    """The names that the instructions of a function load.

    Attributes:
        variables: global variables.
        values: those of them of which more than an attribute is read, except by `super`.
        attributes: attributes and methods of any objects.
        writes: how the code writes to anything besides its own variables, or "".
        changes: whether it may change a tensor or a collection in place that it has not made.
        changes_tensors: whether it may change a tensor in place.
        asks_for_modes: whether it reads `training` of another module than its own.
        variables_of_closures: the variables of functions around that it writes to.
    """

    variables: tuple[str, ...]
    values: frozenset[str]
    attributes: frozenset[str]
    writes: str
    changes: bool
    changes_tensors: bool
    asks_for_modes: bool
    variables_of_closures: frozenset[str]


@cache
def loads_of(code: CodeType) -> Loads:
    """The names that the instructions of a function load, and of the functions inside."""
    instructions, loaded = list(dis.get_instructions(code)), dict[str, set[str]]()
    for each in instructions:
        loaded.setdefault(each.opname, set()).add(str(each.argval))
    pairs = list(pairwise(instructions))
    inner = [loads_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    variables = loaded.get("LOAD_GLOBAL", set[str]()).union(*(each.variables for each in inner))
    attributes = frozenset(name for instruction in _LOAD_ATTRIBUTES for name in loaded.get(instruction, ()))
    if variables & {"getattr", "hasattr"}:  # a string may be a name
        attributes |= {each for each in code.co_consts if isinstance(each, str) and each.strip("_").isidentifier()}
    writes = [how for each, how in _WRITES.items() if each in loaded] + [each.writes for each in inner]
    uses = zip(["", *(each.argval for each in instructions)], pairs, strict=False)
    values = {
        each.argval
        for before, (each, after) in uses
        if each.opname == "LOAD_GLOBAL" and after.opname not in _LOAD_ATTRIBUTES and before != "super"
    }
    has_out = any(isinstance(each, tuple) and "out" in each for each in code.co_consts)  # the names of arguments
    made_here = _collections_made(code, pairs)
    asks_for_modes = any(each.argval == "training" and not _loads_self(code, before) for before, each in pairs)
    return Loads(
        tuple(sorted(variables)),
        frozenset(map(str, values)).union(*(each.values for each in inner)),
        attributes.union(*(each.attributes for each in inner)),
        next(filter(None, writes), ""),
        any(_changes_collection(*pair, made_here) for pair in pairs) or any(each.changes for each in inner),
        has_out or any(map(_changes_tensor, instructions)) or any(each.changes_tensors for each in inner),
        asks_for_modes or any("training" in each.attributes for each in inner),
        frozenset(loaded.get("STORE_DEREF", ())).union(*(each.variables_of_closures for each in inner)),
    )


def _loads_self(code: CodeType, instruction: dis.Instruction) -> bool:
    """Whether this is the last instruction before an attribute of `self`."""
    return "LOAD_FAST" in instruction.opname and _variables_of(instruction)[-1] in code.co_varnames[:1]


def _variables_of(instruction: dis.Instruction) -> tuple[str, ...]:
    """The local variables of an instruction that loads or stores one or two."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (str(instruction.argval),)


def _collections_made(code: CodeType, pairs: list[tuple[dis.Instruction, dis.Instruction]]) -> set[str]:
    """The local variables that hold nothing but lists and dicts of the function itself."""
    stores: dict[str, bool] = dict.fromkeys(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], False)
    for before, each in pairs:
        if "STORE_FAST" in each.opname:
            for i, name in enumerate(_variables_of(each)):
                is_made = before.opname in ("BUILD_LIST", "BUILD_MAP") and i == 0
                stores[name] = stores.get(name, True) and is_made
    return {name for name, is_made in stores.items() if is_made}


def _changes_collection(before: dis.Instruction, instruction: dis.Instruction, made_here: set[str]) -> bool:
    """Whether this stores or deletes an element, or calls a method such as `append`, of a collection from outside."""
    is_made_here = "LOAD_FAST" in before.opname and _variables_of(before)[-1] in made_here
    if instruction.opname in _LOAD_ATTRIBUTES:
        return instruction.argval in _OF_COLLECTIONS and not is_made_here
    adds_number = before.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")) and isinstance(before.argval, (int, float))
    return instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") or (_is_augmented(instruction) and not adds_number)


def _changes_tensor(instruction: dis.Instruction) -> bool:
    """Whether this stores an element, adds in place, or calls a method such as `add_`."""
    method = str(instruction.argval)
    if instruction.opname in _LOAD_ATTRIBUTES:
        return method.endswith("_") and not method.endswith("__")
    return instruction.opname == "STORE_SUBSCR" or _is_augmented(instruction)


def _is_augmented(instruction: dis.Instruction) -> bool:
    """Whether this is an assignment such as `+=`."""
    is_binary = instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")
    return is_binary or instruction.opname.startswith("INPLACE_")


@cache
def digest_of(code: CodeType) -> bytes:
    """A hash of a function's code, which is the same in another process."""
    constants = [digest_of(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    texts = [sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each) for each in constants]
    return sha256(repr((code.co_code, code.co_names, texts)).encode()).digest()


_WRITES = dict.fromkeys(("STORE_ATTR", "DELETE_ATTR"), "writes to attributes")
_WRITES |= dict.fromkeys(("STORE_GLOBAL", "DELETE_GLOBAL"), "writes to global variables")
_WRITES |= dict.fromkeys(("IMPORT_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME"), "imports a module or makes a class")
_WRITES |= {"MATCH_CLASS": "matches attributes of objects"}
_LOAD_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_OF_COLLECTIONS = {"append", "extend", "insert", "remove", "clear", "update", "setdefault", "popitem", "add", "discard"}
_OF_COLLECTIONS |= {"pop", "sort", "reverse", "move_to_end"}
READS_ANY = {"attrgetter", "methodcaller", "__getattribute__", "__getattr__"}
"""Attributes by which code reads others, whose names it may compute."""
