"""One sentence for a bad argument: its name, what was found, what is allowed."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def check_whole(name: str, value: Any, at_least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least {at_least}")


def check_between(name: str, value: Any, low: float, high: float, closed: str) -> None:
    """`closed` is "[)" for low ≤ value < high, "(]" for low < value ≤ high, and "()" where neither may be reached."""
    above = isinstance(value, Real) and (low < value or (closed[0] == "[" and low == value))
    if not above or not (value < high or (closed[1] == "]" and value == high)):
        raise ValueError(f"{name} is {value!r}, but must be a number in {closed[0]}{low}, {high}{closed[1]}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, allowed))}")
