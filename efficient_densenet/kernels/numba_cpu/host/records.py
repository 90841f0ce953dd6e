"""How a record of `arguments` lies in memory: as a NumPy dtype for the kernel, as bytes from the host's fields."""

import functools
import struct
import types
import typing
from collections.abc import Callable

import numpy as np


class Element:
    """Says that a group has elements: their dtype, which takes no memory."""


class Operand:
    """Says that a group has operands of products: their dtype, which takes no memory either."""


def record_dtype(arguments: type, zero: np.dtype, element: np.dtype, operand: np.dtype) -> np.dtype:
    """The record as a kernel reads it: for arithmetic in `zero`'s dtype on matrices of `element`s, by products of
    `operand`s."""
    fields, markers = typing.get_type_hints(arguments).items(), {Element: element, Operand: operand}
    return np.dtype([*((name, _field_dtype(hint, markers)) for name, hint in fields), ("zero", zero)])


def packer(arguments: type) -> Callable[..., bytes]:
    """What turns the record's integers into its bytes. `zero` is 0 in every dtype, and of at most eight bytes."""
    return struct.Struct(f"{_num_fields(arguments)}q8x").pack


@functools.cache
def absent(group: type) -> tuple[int, ...]:
    return (0,) * _num_fields(group)


def _num_fields(group: type) -> int:
    markers = dict.fromkeys((Element, Operand), np.dtype(np.int8))
    return _group_dtype(group, markers).itemsize // 8


def _group_dtype(group: type, markers: dict[type, np.dtype]) -> np.dtype:
    """A marker lies where the group begins, on another field: it has a dtype, and a value that nobody reads."""
    names, formats, offsets, end = [], [], [], 0
    for name, hint in typing.get_type_hints(group).items():
        is_marker = hint in markers
        names.append(name)
        formats.append(markers[hint] if is_marker else _field_dtype(hint, markers))
        offsets.append(0 if is_marker else end)
        end += 0 if is_marker else formats[-1].itemsize
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end})


def _field_dtype(hint: typing.Any, markers: dict[type, np.dtype]) -> np.dtype:
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]  # the other one is None
    return np.dtype(np.int64) if hint is int else _group_dtype(hint, markers)
