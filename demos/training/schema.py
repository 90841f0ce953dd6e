"""What a file may contain, as data, and the one check of a file against it."""

import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from efficient_densenet._checks import Rule, describe


@dataclass(frozen=True)
class Record:
    """A dict with these fields, of which those in `may_lack` may be missing; only an `open` one may have others."""

    fields: Mapping[Any, "Schema"]
    may_lack: frozenset[Any] = frozenset()
    open: bool = False


@dataclass(frozen=True)
class Items:
    """A list of at least so many items."""

    item: "Schema"
    at_least: int = 1


Schema = Rule | Record | Items


class Mismatch(NamedTuple):
    """A field, what was found there, and what is needed."""

    field: str
    found: str
    needed: str


def mismatch(value: Any, schema: Schema, field: str = "") -> Mismatch | None:
    """The first field of `value` that is not as `schema` says."""
    if isinstance(schema, Record) and isinstance(value, dict):
        return _mismatch_in_record(value, schema, field)
    if isinstance(schema, Items) and isinstance(value, (list, tuple)):
        if len(value) >= schema.at_least:
            found = (mismatch(item, schema.item, _join(field, i)) for i, item in enumerate(value))
            return next(filter(None, found), None)
    elif isinstance(schema, Rule) and schema.accepts(value):
        return None
    return Mismatch(field, f"is {describe(value)}", f"must be {_needed(schema)}")


def _mismatch_in_record(value: dict[Any, Any], schema: Record, field: str) -> Mismatch | None:
    for name, inner in schema.fields.items():
        if name in value:
            found = mismatch(value[name], inner, _join(field, name))
            if found:
                return found
        elif name not in schema.may_lack:
            return Mismatch(_join(field, name), "is missing", f"must be {_needed(inner)}")
    extra = [name for name in value if name not in schema.fields]
    if extra and not schema.open:
        return Mismatch(_join(field, extra[0]), f"is {describe(value[extra[0]])}", "there is no field of that name")
    return None


def check_file(path: Path, value: Any, schema: Schema) -> None:
    refuse(path, mismatch(value, schema))


def check_fields(path: Path, fields: Iterable[tuple[str, Any, Rule]]) -> None:
    """Check fields whose rule depends on other fields: the name, the value and the rule of each."""
    refuse(path, next(filter(None, (mismatch(value, rule, name) for name, value, rule in fields)), None))


def refuse(path: Path, mismatch: Mismatch | None) -> None:
    """Raise ValueError if there is a mismatch."""
    if mismatch:
        where = f"{path}: {mismatch.field}" if mismatch.field else f"{path}: its content"
        raise ValueError(
            f"{where} {mismatch.found}, but {mismatch.needed}; the file was left unchanged: "
            "restore it from a copy, or give another run"
        )


def _needed(schema: Schema) -> str:
    if isinstance(schema, Rule):
        return schema.needed
    if isinstance(schema, Items):
        return f"a list of at least {schema.at_least}"
    names = [str(name) for name in schema.fields]
    return f"a dict with {', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else "an empty dict"


def _join(field: str, name: Hashable) -> str:
    shown = str(name) if str(name).isprintable() else ascii(name)
    return f"{field}.{shown}" if field else shown


def equal_to(expected: Any) -> Rule:
    """The same value of the same kind; a list may be a tuple."""

    def accepts(value: Any) -> bool:
        if isinstance(expected, (list, tuple)):
            same_length = isinstance(value, (list, tuple)) and len(value) == len(expected)
            return same_length and all(equal_to(e).accepts(v) for v, e in zip(value, expected, strict=True))
        return type(value) is type(expected) and value == expected

    return Rule(describe(expected), accepts)


def text(empty: bool = False) -> Rule:
    """A text of Unicode characters, which half of a surrogate pair is not."""

    def accepts(value: Any) -> bool:
        return isinstance(value, str) and (empty or value != "") and is_utf8(value)

    return Rule("a text" if empty else "a text that is not empty", accepts)


def is_utf8(value: str) -> bool:
    """Whether it can be encoded; a file name that is no valid UTF-8 cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def path_name() -> Rule:
    """A path that the operating system takes; it need not be valid UTF-8."""

    def accepts(value: Any) -> bool:
        if not isinstance(value, str) or value == "" or "\0" in value:
            return False
        try:
            return bool(os.fsencode(value))
        except UnicodeEncodeError:
            return False

    return Rule("a path", accepts)


def tensor_like(expected: Tensor, nonnegative: bool = False) -> Rule:
    """A dense tensor in memory that can take the place of `expected`."""
    floating = expected.is_floating_point()
    dtypes = {torch.float16, torch.bfloat16, torch.float32, torch.float64} if floating else {expected.dtype}

    def accepts(value: Any) -> bool:
        if type(value) not in (Tensor, nn.Parameter) or value.is_nested or value.layout is not torch.strided:
            return False
        if value.device.type != "cpu" or value.dtype not in dtypes or value.shape != expected.shape:
            return False
        return bool(torch.isfinite(value).all()) and not (nonnegative and bool((value < 0).any()))

    sign = "nonnegative " if nonnegative else ""
    shape = "×".join(map(str, expected.shape)) or "no dimensions"
    return Rule(f"a dense tensor of {shape}, {expected.dtype}, with {sign}finite values", accepts)


def tensors_like(expected: Mapping[str, Tensor]) -> Record:
    """A state dict with the same names and shapes."""
    counted = ("running_var", "num_batches_tracked")
    return Record({name: tensor_like(tensor, name.endswith(counted)) for name, tensor in expected.items()})
