"""How a record of `arguments` lies in memory: as a NumPy dtype for the kernel, as bytes from the host's fields."""

import functools
import struct
import types
import typing
from collections.abc import Callable

import numpy as np


def record_dtype(arguments: type, dtype: np.dtype) -> np.dtype:
    """The record as a kernel for matrices of this dtype reads it."""
    return np.dtype([*_fields(arguments), ("zero", dtype)])


def packer(arguments: type) -> Callable[..., bytes]:
    """What turns the record's integers into its bytes. `zero` is 0 in every dtype, and of at most eight bytes."""
    return struct.Struct(f"{_num_fields(arguments)}q8x").pack


@functools.cache
def absent(group: type) -> tuple[int, ...]:
    return (0,) * _num_fields(group)


def _num_fields(group: type) -> int:
    return np.dtype(_fields(group)).itemsize // 8


def _fields(group: type) -> list[tuple[str, np.dtype]]:
    return [(name, _field_dtype(hint)) for name, hint in typing.get_type_hints(group).items()]


def _field_dtype(hint: typing.Any) -> np.dtype:
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]  # the other one is None
    return np.dtype(np.int64 if hint is int else _fields(hint))
