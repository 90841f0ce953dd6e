"""Per-thread state of checkpointing: forward, recomputation, or disabled."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class _ThreadState(threading.local):
    """`is_selective` is True inside a context of a `context_fn`, whose dispatch mode may count operations."""

    in_forward = in_recomputation = is_selective = is_disabled = False


state = _ThreadState()


@contextmanager
def with_attributes(changes: dict[Any, dict[str, Any]]) -> Iterator[None]:
    """Return a context in which attributes of objects have other values."""
    changed = [
        (owner, name, getattr(owner, name), value)
        for owner, new in changes.items()
        for name, value in new.items()
        if getattr(owner, name) is not value
    ]
    for owner, name, _, value in changed:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value, _ in changed:
            setattr(owner, name, value)


def state_with(**changes: bool) -> AbstractContextManager:
    """Return a context in which attributes of `state` have other values."""
    return with_attributes({state: changes})


def is_checkpointing() -> bool:
    """Return True in the forward of a checkpointed function, whose operations will be recomputed in the backward."""
    return state.in_forward and not state.in_recomputation


def is_recomputing() -> bool:
    """Return True in a recomputation. A module that counts its calls should not count this one.

    If checkpoints are nested, the inner forward that runs within the outer recomputation is part of the recomputation.
    """
    return state.in_recomputation


def disable_checkpointing() -> AbstractContextManager:
    """Make `checkpoint` and wrapped modules call their functions without checkpointing, in this thread."""
    return state_with(is_disabled=True)
