"""The memory layout of a record of `arguments`: a NumPy dtype for the kernel, packed bytes from the host's fields."""

import functools
import struct
import types
import typing
from collections.abc import Callable

import numpy as np


class Element:
    """Marks a group that has elements. The field has their dtype, and takes no memory."""


class Operand:
    """Marks a group that has operands of products. The field has their dtype, and takes no memory."""


def record_dtype(arguments: type, zero: np.dtype, element: np.dtype, operand: np.dtype) -> np.dtype:
    """The record as a kernel reads it. `zero` is the dtype of the arithmetic, `element` of matrices and `operand` of
    the operands of products."""
    fields, markers = typing.get_type_hints(arguments).items(), {Element: element, Operand: operand}
    return np.dtype([*((name, _field_dtype(hint, markers)) for name, hint in fields), ("zero", zero)])


def packer(arguments: type) -> Callable[..., bytes]:
    """The function that packs the record's integers into bytes, with eight zero bytes for `zero` of any dtype."""
    return struct.Struct(f"{_num_fields(arguments)}q8x").pack


@functools.cache
def absent(group: type) -> tuple[int, ...]:
    return (0,) * _num_fields(group)


def _num_fields(group: type) -> int:
    markers = dict.fromkeys((Element, Operand), np.dtype(np.int8))
    return _group_dtype(group, markers).itemsize // 8


def _group_dtype(group: type, markers: dict[type, np.dtype]) -> np.dtype:
    """A marker has offset 0 and overlaps another field: only its dtype is read, not its value."""
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
        hint = typing.get_args(hint)[0]  # the other type is None
    return np.dtype(np.int64) if hint is int else _group_dtype(hint, markers)
