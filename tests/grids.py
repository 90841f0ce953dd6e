"""Parametrized grids in two tiers: every pair of values in the first, the full product in the exhaustive one."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def grid(where: Callable[..., bool] | None = None, /, *, strength: int = 2, **axes: Iterable) -> tuple[str, list]:
    """The arguments of `pytest.mark.parametrize` for the product of the axes.

    An axis named `a__b` has pairs as its values. `where` takes the values of a combination by name and returns whether
    the combination makes sense: the others are never generated. The first tier is a covering array of the rest: with
    strength 2 it contains every pair of values of two axes that the product contains. The other combinations are marked
    exhaustive.
    """
    names = ",".join(axes).replace("__", ",")
    widths = [axis.count("__") + 1 for axis in axes]
    rows = []
    for choice in itertools.product(*(enumerate(values) for values in axes.values())):
        parts = [value if width > 1 else (value,) for (_, value), width in zip(choice, widths, strict=True)]
        values = list(itertools.chain(*parts))
        if where is None or where(**dict(zip(names.split(","), values, strict=True))):
            rows.append(([position for position, _ in choice], values))
    first_tier = covering_array([positions for positions, _ in rows], strength)
    return names, [
        pytest.param(*values, id="-".join(map(_word, values)), marks=() if i in first_tier else pytest.mark.exhaustive)
        for i, (_, values) in enumerate(rows)
    ]


def covering_array(rows: Sequence[Sequence[Any]], strength: int = 2) -> set[int]:
    """The indices of a few rows that contain every combination of values that `strength` columns of the rows contain.

    Greedy: each time the first of the rows that contain most of what is still missing.
    """
    columns = range(len(rows[0]) if rows else 0)
    places = list(itertools.combinations(columns, min(strength, len(columns))))
    numbers: dict[tuple, int] = {}
    covers = [sum(1 << numbers.setdefault((p, *(row[i] for i in p)), len(numbers)) for p in places) for row in rows]
    missing, chosen = (1 << len(numbers)) - 1, set()
    while missing:
        best = max(range(len(rows)), key=lambda i: (covers[i] & missing).bit_count())
        chosen.add(best)
        missing &= ~covers[best]
    return chosen


def _word(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return "x".join(map(_word, value))
    name = getattr(value, "__name__", None) if callable(value) else None
    return (name or str(value)).removeprefix("torch.").lstrip("_")
