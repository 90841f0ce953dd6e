"""The recorder, if there is one in this thread, that sees each launch of a kernel (`engine.recording`)."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Place(NamedTuple):
    """A tensor: its first element lies `offset` bytes after that of the first tensor in a memory, which has a number in
    a run."""

    memory: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Run:
    """The memories of one run by their numbers, as launches read them: first tensors, and addresses in an array of
    int64."""

    __slots__ = ("addresses", "values")

    def __init__(self, values: list[Any], addresses: Any) -> None:
        self.values, self.addresses = values, addresses

    def tensor(self, place: Place) -> Tensor:
        base = self.values[place.memory]
        return base.as_strided(place.size, place.stride, base.storage_offset() + place.offset // place.dtype.itemsize)


class Launches(Protocol):
    """Launches that follow each other, made once and run any number of times, by several threads at once.

    Each is made of a pair: the kernel with its settings, and its arguments, in which tensors are places.
    """

    def __init__(self, launches: Sequence[tuple[Any, Sequence[Any]]]) -> None: ...

    def __call__(self, run: Run) -> None: ...


class LaunchRecorder(Protocol):
    def argument(self, tensor: Tensor, offset: int = 0) -> Place | None:
        """The place some bytes after the start of a tensor."""
        ...

    def launched(self, kind: type[Launches], kernel: Any, arguments: Sequence[Any]) -> None: ...


_local = threading.local()


def recorder() -> LaunchRecorder | None:
    return getattr(_local, "recorder", None)


@contextlib.contextmanager
def seen_by(each: LaunchRecorder) -> Iterator[None]:
    """In this context and thread, `each` is told of every launch."""
    _local.recorder = each
    try:
        yield
    finally:
        _local.recorder = None
