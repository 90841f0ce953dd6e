"""The recorder, if there is one in this thread, that sees each launch of a kernel (`engine.recording`)."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor


class Launches(Protocol):
    """Launches that follow each other, made once and run any number of times, by several threads at once.

    Each is made of a pair: the kernel with its settings, and its arguments, in which tensors are `Argument`s.
    """

    def __init__(self, launches: Sequence[tuple[Any, Sequence[Any]]]) -> None: ...

    def __call__(self, run: "Run") -> None: ...


class Argument(Protocol):
    """A tensor among the arguments: some bytes after the start of a memory, which has a number in a run."""

    memory: int
    offset: int


class Run(Protocol):
    """One run of a program: addresses (an array of int64) and first tensors of its memories, by their numbers."""

    addresses: Any
    values: Sequence[Any]

    def tensor(self, argument: Argument) -> Tensor: ...


class LaunchRecorder(Protocol):
    def argument(self, tensor: Tensor, offset: int = 0) -> Any:
        """The `Argument` for an address some bytes after the start of a tensor."""
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
