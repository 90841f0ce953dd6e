"""Checks of arguments. Each error message is one sentence: the argument's name, its value, and what it must be."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def check_integer(name: str, value: Any, at_least: int) -> None:
    """Raise ValueError unless `value` is an integer and not less than `at_least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least {at_least}")


def check_between(name: str, value: Any, low: float, high: float, closed: str) -> None:
    """Raise ValueError unless `value` is a number in an interval from `low` to `high`.

    `closed` gives the brackets of the interval: "[" and "]" include the bound, "(" and ")" exclude it.
    """
    if not isinstance(value, Real) or not _in_interval(value, low, high, closed):
        raise ValueError(f"{name} is {value!r}, but must be a number in {closed[0]}{low}, {high}{closed[1]}")


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, allowed))}")


def _in_interval(value: Any, low: float, high: float, closed: str) -> bool:
    above = low < value or (closed[0] == "[" and low == value)
    below = value < high or (closed[1] == "]" and value == high)
    return above and below
