"""How a record of `arguments` lies in memory: as a NumPy dtype for the kernel, as bytes from the host's fields."""

import functools
import struct
import types
import typing
from collections.abc import Callable

import numpy as np


class Element:
    """Says that a group has elements: their dtype, which takes no memory."""


def record_dtype(arguments: type, zero: np.dtype, element: np.dtype) -> np.dtype:
    """The record as a kernel for arithmetic in `zero`'s dtype on matrices of `element`s reads it."""
    fields = typing.get_type_hints(arguments).items()
    return np.dtype([*((name, _field_dtype(hint, element)) for name, hint in fields), ("zero", zero)])


def packer(arguments: type) -> Callable[..., bytes]:
    """What turns the record's integers into its bytes. `zero` is 0 in every dtype, and of at most eight bytes."""
    return struct.Struct(f"{_num_fields(arguments)}q8x").pack


@functools.cache
def absent(group: type) -> tuple[int, ...]:
    return (0,) * _num_fields(group)


def _num_fields(group: type) -> int:
    return _group_dtype(group, np.dtype(np.int8)).itemsize // 8


def _group_dtype(group: type, element: np.dtype) -> np.dtype:
    """An `Element` lies where the group begins, on another field: it has a dtype, and a value that nobody reads."""
    names, formats, offsets, end = [], [], [], 0
    for name, hint in typing.get_type_hints(group).items():
        is_element = hint is Element
        names.append(name)
        formats.append(element if is_element else _field_dtype(hint, element))
        offsets.append(0 if is_element else end)
        end += 0 if is_element else formats[-1].itemsize
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end})


def _field_dtype(hint: typing.Any, element: np.dtype) -> np.dtype:
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]  # the other one is None
    return np.dtype(np.int64) if hint is int else _group_dtype(hint, element)
