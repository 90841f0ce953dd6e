"""Rules for argument values. Each message is one sentence: the argument's name, its value, what it must be."""

from collections.abc import Callable
from numbers import Integral, Number, Real
from typing import Any, NamedTuple

import torch


class Rule(NamedTuple):
    """A condition on a value: `needed` says it in words that follow "must be", and `accepts` tests it."""

    needed: str
    accepts: Callable[[Any], bool]


def integer(at_least: int, at_most: int | None = None) -> Rule:
    """A whole number within these bounds; booleans are refused."""

    def accepts(value: Any) -> bool:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return whole and at_least <= int(value) and (at_most is None or int(value) <= at_most)

    upper = "" if at_most is None else f" and at most {at_most}"
    return Rule(f"a whole number of at least {at_least}{upper}", accepts)


def number(low: float, high: float, closed: str) -> Rule:
    """A number in an interval; booleans are refused.

    `closed` gives the brackets of the interval: "[" and "]" include the bound, "(" and ")" exclude it.
    """

    def accepts(value: Any) -> bool:
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        try:
            value = float(value)
        except OverflowError:  # an integer of hundreds of digits
            return False
        above = low < value or (closed[0] == "[" and low == value)
        return above and (value < high or (closed[1] == "]" and value == high))

    return Rule(f"a number in {closed[0]}{low}, {high}{closed[1]}", accepts)


def choice(*allowed: Any) -> Rule:
    """One of the `allowed` values; True and 1 are different values."""

    def accepts(value: Any) -> bool:
        plain = value is None or isinstance(value, (str, Number))  # == on a tensor returns a tensor
        return plain and any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in allowed)

    return Rule(f"one of {', '.join(map(repr, allowed))}", accepts)


def check(name: str, value: Any, rule: Rule) -> None:
    """Raise ValueError unless `value` satisfies `rule`."""
    if not rule.accepts(value):
        raise ValueError(f"{name} is {describe(value)}, but must be {rule.needed}")


def check_module(function: str, value: Any) -> None:
    """Raise TypeError unless `value` is a module."""
    if not isinstance(value, torch.nn.Module):
        hint = f", as in {function}({value.__name__}())" if callable(value) and hasattr(value, "__name__") else ""
        raise TypeError(f"{function} needs a module, found {describe(value)}: give the model itself{hint}")


def describe(value: Any) -> str:
    """The value's repr or, where that is too long for a message, its type and size."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "a nested tensor"
        shape = "×".join(map(str, value.shape)) or "no dimensions"
        dense = value.layout is torch.strided and value.device.type != "meta"
        finite = not dense or not value.is_floating_point() or bool(torch.isfinite(value.float()).all())
        more = "" if finite else ", with values that are not finite"
        return f"a tensor of {shape}, {value.dtype}, {value.layout}, on {value.device}{more}"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a huge number"
    text = repr(value)
    if len(text) <= 80 and text.isprintable():
        return text
    if isinstance(value, str):
        return f"{value[:60]!a} …"
    size = f" of {len(value)}" if isinstance(value, (dict, list, tuple, set, bytes)) else ""
    return f"a {type(value).__name__}{size}"
