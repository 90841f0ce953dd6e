"""Per-thread state of checkpointing: forward, recomputation, or disabled."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class _ThreadState(threading.local):
    """`is_selective` is True inside a context of a `context_fn`, whose dispatch mode may count operations."""

    in_forward = in_recomputation = is_selective = is_disabled = False


state = _ThreadState()


@contextmanager
def state_with(**changes: bool) -> Iterator[None]:
    """Return a context in which attributes of `state` have other values."""
    before = {name: getattr(state, name) for name in changes}
    vars(state).update(changes)
    try:
        yield
    finally:
        vars(state).update(before)


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
