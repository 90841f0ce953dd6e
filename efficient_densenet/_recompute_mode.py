"""Per-thread state of checkpointing: forward, recomputation, or disabled."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class _ThreadState(threading.local):
    forward_depth = 0
    recomputation_depth = 0
    disable_depth = 0
    user_context_depth = 0


_state = _ThreadState()


def is_checkpointing() -> bool:
    """Return True in the forward of a checkpointed function, whose operations will be recomputed in the backward."""
    return _state.forward_depth > 0 and _state.recomputation_depth == 0


def is_recomputing() -> bool:
    """Return True in a recomputation. A module that counts its calls should not count this one.

    If checkpoints are nested, the inner forward that runs within the outer recomputation is part of the recomputation.
    """
    return _state.recomputation_depth > 0


def disable_checkpointing() -> AbstractContextManager:
    """Make `checkpoint` and wrapped modules call their functions without checkpointing, in this thread."""
    return _Inside("disable_depth")


def is_checkpointing_disabled() -> bool:
    """Return True inside `disable_checkpointing()`."""
    return _state.disable_depth > 0


def checkpointed_forward() -> AbstractContextManager:
    """Mark the forward of a checkpointed function."""
    return _Inside("forward_depth")


@contextmanager
def recomputing() -> Iterator[None]:
    """Mark the recomputation of a checkpointed function."""
    # The recomputation must checkpoint what the forward checkpointed, even if the backward is called inside
    # `disable_checkpointing()`.
    disable_depth, _state.disable_depth = _state.disable_depth, 0
    try:
        with _Inside("recomputation_depth"):
            yield
    finally:
        _state.disable_depth = disable_depth


def in_user_context() -> AbstractContextManager:
    """Mark code that runs in a context of a `context_fn`, whose dispatch mode may count operations."""
    return _Inside("user_context_depth")


class _Inside:
    """A context in which one of the depths is larger by one."""

    def __init__(self, depth: str) -> None:
        self.depth = depth

    def __enter__(self) -> None:
        setattr(_state, self.depth, getattr(_state, self.depth) + 1)

    def __exit__(self, *_: object) -> None:
        setattr(_state, self.depth, getattr(_state, self.depth) - 1)


def is_in_user_context() -> bool:
    """Return True inside a context of a `context_fn`."""
    return _state.user_context_depth > 0
