"""Which of a checkpointed function's two runs this thread is in, and whether checkpointing is wanted at all."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Modes(threading.local):
    first_runs = 0
    second_runs = 0
    disabled = 0


_modes = _Modes()


def is_checkpointing() -> bool:
    """True in the first run of a checkpointed function: what is computed now will be computed again."""
    return _modes.first_runs > 0 and _modes.second_runs == 0


def is_recomputing() -> bool:
    """True in the second run: what is computed now has been computed before, so a module's counters should rest.

    A checkpoint inside a checkpoint makes its own first run within the outer one's second; that counts as a second run.
    """
    return _modes.second_runs > 0


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Let `checkpoint` and wrapped modules call straight through, in this thread."""
    _modes.disabled += 1
    try:
        yield
    finally:
        _modes.disabled -= 1


def is_disabled() -> bool:
    return _modes.disabled > 0


def is_in_a_run() -> bool:
    """True inside any checkpointed function, in either run."""
    return _modes.first_runs + _modes.second_runs > 0


@contextmanager
def first_run() -> Iterator[None]:
    _modes.first_runs += 1
    try:
        yield
    finally:
        _modes.first_runs -= 1


@contextmanager
def second_run() -> Iterator[None]:
    # What was checkpointed in the first run is checkpointed in the second, wherever its backward is called.
    disabled, _modes.disabled = _modes.disabled, 0
    _modes.second_runs += 1
    try:
        yield
    finally:
        _modes.second_runs -= 1
        _modes.disabled = disabled
