"""One sentence for a bad argument: its name, what was found, what is allowed."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any


def check_whole(name: str, value: Any, at_least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least {at_least}")


def check_fraction(name: str, value: float, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}, but must be {allowed}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, allowed))}")
