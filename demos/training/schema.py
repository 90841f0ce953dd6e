"""What a file may contain, as data, and the one check of a file against it.

`torch.load(weights_only=True)` and strict loading would take a state that is not finite, of another dtype, or of no
device, and options and positions that no run can have; and they name no field. Files say which one is wrong.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from efficient_densenet._checks import Rule, describe

Schema = Any
"""A rule; a list with the schema of every item; or a dict with the schema of every field. Fields whose name begins with
a question mark may be missing; where `...` is a field, there may be others."""


class Mismatch(NamedTuple):
    """A field, what was found there, and what is needed."""

    field: str
    found: str
    needed: str


def check_file(path: Path, value: Any, schema: Schema) -> None:
    """Raise ValueError, with the name of the field, unless the content of a file is as `schema` says."""
    check_fields(path, [("", value, schema)])


def check_fields(path: Path, fields: Iterable[tuple[str, Any, Schema]]) -> None:
    """Check fields one after another, by the name, the value and the schema of each."""
    for name, value, schema in fields:
        for field, found, needed in mismatches(value, schema, name):
            raise ValueError(
                f"{path}: {field or 'its content'} {found}, but {needed}; the file was left unchanged: "
                "restore it from a copy, or give another run"
            )


def mismatches(value: Any, schema: Schema, field: str = "") -> Iterator[Mismatch]:
    """What in `value` is not as the schema says."""
    if isinstance(schema, dict) and isinstance(value, dict):
        yield from _mismatches_in_dict(value, schema, field)
    elif isinstance(schema, list) and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from mismatches(item, schema[0], _join(field, i))
    elif not isinstance(schema, Rule) or not schema.accepts(value):
        yield Mismatch(field, f"is {describe(value)}", f"must be {_needed(schema)}")


def _mismatches_in_dict(value: dict[Any, Any], schema: dict[Any, Schema], field: str) -> Iterator[Mismatch]:
    known = {_name(key): inner for key, inner in schema.items() if key is not ...}
    for name, inner in known.items():
        if name in value:
            yield from mismatches(value[name], inner, _join(field, name))
        elif f"?{name}" not in schema:
            yield Mismatch(_join(field, name), "is missing", f"must be {_needed(inner)}")
    for name in value:
        if name not in known and ... not in schema:
            yield Mismatch(_join(field, name), f"is {describe(value[name])}", "there is no field of that name")


def _name(key: Any) -> Any:
    return key.removeprefix("?") if isinstance(key, str) else key


def _needed(schema: Schema) -> str:
    if isinstance(schema, Rule):
        return schema.needed
    names = [str(_name(name)) for name in schema]
    return "a list" if isinstance(schema, list) else f"a dict with {', '.join(names[:3])}{', …' * (len(names) > 3)}"


def _join(field: str, name: Any) -> str:
    shown = str(name) if str(name).isprintable() else ascii(name)
    return f"{field}.{shown}" if field else shown


ANY_DICT = Rule("a dict", lambda value: isinstance(value, dict))


def equal_to(expected: Any) -> Rule:
    """The same value of the same kind; a list may be a tuple."""

    def accepts(value: Any) -> bool:
        if isinstance(expected, (list, tuple)):
            same_length = isinstance(value, (list, tuple)) and len(value) == len(expected)
            return same_length and all(equal_to(e).accepts(v) for v, e in zip(value, expected, strict=True))
        return type(value) is type(expected) and value == expected

    return Rule(describe(expected), accepts)


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """A list of `length` items, or by default of any number but none."""

    def accepts(value: Any) -> bool:
        return (
            isinstance(value, (list, tuple))
            and len(value) == (length or max(len(value), 1))
            and all(map(rule.accepts, value))
        )

    return Rule(f"a list of {length or 'at least 1'}, each {rule.needed}", accepts)


def text(empty: bool = False) -> Rule:
    """A text of Unicode characters, which half of a surrogate pair is not."""
    needed = "a text" if empty else "a text that is not empty"
    return Rule(needed, lambda value: isinstance(value, str) and (empty or value != "") and is_utf8(value))


def is_utf8(value: str) -> bool:
    """Whether it can be encoded; a file name that is no valid UTF-8 cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def path_name() -> Rule:
    """A path that the operating system takes; it need not be valid UTF-8."""

    def accepts(value: Any) -> bool:
        try:
            return isinstance(value, str) and "\0" not in value and bool(os.fsencode(value))
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


def tensors_like(expected: Mapping[str, Tensor]) -> dict[Any, Schema]:
    """The schema of a state dict with the same names and shapes."""
    counted = ("running_var", "num_batches_tracked")
    return {name: tensor_like(tensor, name.endswith(counted)) for name, tensor in expected.items()}
