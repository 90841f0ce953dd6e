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
        attributes: attributes and methods of any objects.
        writes: what the code writes to besides its own variables, or "".
        changes: whether it may change a tensor or a collection in place.
        asks_for_modes: whether it reads `training` of another module than its own.
        variables_of_closures: the variables of functions around that it writes to.
    """

    variables: tuple[str, ...]
    attributes: frozenset[str]
    writes: str
    changes: bool
    asks_for_modes: bool
    variables_of_closures: frozenset[str]


@cache
def loads_of(code: CodeType) -> Loads:
    """The names that the instructions of a function load, and of the functions inside."""
    instructions, loaded = list(dis.get_instructions(code)), dict[str, set[str]]()
    for each in instructions:
        loaded.setdefault(each.opname, set()).add(str(each.argval))
    pairs = pairwise(instructions)
    asks_for_modes = any(each.argval == "training" and not _loads_self(code, before) for before, each in pairs)
    inner = [loads_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    variables = loaded.get("LOAD_GLOBAL", set[str]()).union(*(each.variables for each in inner))
    attributes = frozenset(name for instruction in _LOAD_ATTRIBUTES for name in loaded.get(instruction, ()))
    writes = [what for each, what in _WRITES.items() if each in loaded] + [each.writes for each in inner]
    changes = any(map(_changes_in_place, instructions)) or any(each.changes for each in inner)
    return Loads(
        tuple(sorted(variables)),
        attributes.union(*(each.attributes for each in inner)),
        next(filter(None, writes), ""),
        changes,
        asks_for_modes or any(each.asks_for_modes for each in inner),
        frozenset(loaded.get("STORE_DEREF", ())).union(*(each.variables_of_closures for each in inner)),
    )


def _loads_self(code: CodeType, instruction: dis.Instruction) -> bool:
    """Whether this is the last instruction before an attribute of `self`."""
    loaded = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return "LOAD_FAST" in instruction.opname and loaded[-1] in code.co_varnames[:1]


def _changes_in_place(instruction: dis.Instruction) -> bool:
    """Whether this stores an element, adds in place, or calls a method such as `append` or `add_`."""
    name, method = instruction.opname, str(instruction.argval)
    if name in _LOAD_ATTRIBUTES:
        return method in _OF_COLLECTIONS or (method.endswith("_") and not method.endswith("__"))
    is_augmented = name.startswith("INPLACE_") or (name == "BINARY_OP" and instruction.argrepr.endswith("="))
    return name == "STORE_SUBSCR" or is_augmented


@cache
def digest_of(code: CodeType) -> bytes:
    """A hash of a function's code, which is the same in another process."""
    constants = [digest_of(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    texts = [sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each) for each in constants]
    return sha256(repr((code.co_code, code.co_names, texts)).encode()).digest()


_WRITES = dict.fromkeys(("STORE_ATTR", "DELETE_ATTR"), "attributes")
_WRITES |= dict.fromkeys(("STORE_GLOBAL", "DELETE_GLOBAL"), "global variables")
_WRITES |= dict.fromkeys(("IMPORT_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME"), "what an import or a new class may change")
_LOAD_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_OF_COLLECTIONS = {"append", "extend", "insert", "remove", "clear", "update", "setdefault", "popitem", "add", "discard"}
