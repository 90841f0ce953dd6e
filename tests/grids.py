"""Parametrized grids in two tiers: the first covers every pair of values, the exhaustive one is the full product."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import pytest


def grid(where: Callable[..., bool] | None = None, /, *, strength: int = 2, **axes: Iterable) -> tuple[str, list]:
    """The arguments of `pytest.mark.parametrize` for the product of the axes.

    The values of an axis named `a__b` are pairs. `where` takes a combination by keyword and returns whether it is
    valid; invalid combinations are not generated. The first tier is a covering array of the valid ones: with strength 2
    it contains every pair of values of two axes that occurs in them. The others are marked exhaustive.
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


def pairwise(where: Callable[..., bool] | None = None, /, **axes: Iterable) -> tuple[str, list]:
    """The first tier of a grid alone, where the whole product takes too long for any tier."""
    names, params = grid(where, **axes)
    return names, [param for param in params if not param.marks]


def pairwise_exhaustive(**axes: Iterable) -> tuple[str, list]:
    """The same in the exhaustive tier, but for rows that cover every value."""
    names, params = pairwise(**axes)
    first_tier = covering_array([[*map(_word, param.values)] for param in params], 1)
    marks = [() if i in first_tier else pytest.mark.exhaustive for i in range(len(params))]
    return names, [pytest.param(*p.values, id=p.id, marks=m) for p, m in zip(params, marks, strict=True)]


def sampled(where: Callable[..., bool], /, count: int = 1500, **axes: Sequence) -> tuple[str, list]:
    """Like `grid`, for a product that is too large to list: `count` random combinations take its place.

    The first tier covers every pair of values among them; 300 of the others are exhaustive.
    """
    random, rows = Random(0), []
    while len(rows) < count:
        row = [random.randrange(len(values)) for values in axes.values()]
        values = [values[i] for i, values in zip(row, axes.values(), strict=True)]
        if where(**dict(zip(axes, values, strict=True))):
            rows.append((row, values))
    first_tier = covering_array([row for row, _ in rows], 2)
    others = [i for i in range(count) if i not in first_tier][:300]
    return ",".join(axes), [
        pytest.param(*rows[i][1], id="-".join(map(_word, rows[i][1])), marks=marks)
        for indices, marks in ((sorted(first_tier), ()), (others, pytest.mark.exhaustive))
        for i in indices
    ]


def covering_array(rows: Sequence[Sequence[Any]], strength: int = 2) -> set[int]:
    """Indices of a subset of rows that covers every combination of values in any `strength` columns.

    Greedy: each step adds the first row that covers the most uncovered combinations.
    """
    columns = range(len(rows[0]) if rows else 0)
    column_sets = list(itertools.combinations(columns, min(strength, len(columns))))
    bits: dict[tuple, int] = {}
    covers = [sum(1 << bits.setdefault((c, *(row[i] for i in c)), len(bits)) for c in column_sets) for row in rows]
    uncovered, chosen = (1 << len(bits)) - 1, set()
    while uncovered:
        best = max(range(len(rows)), key=lambda i: (covers[i] & uncovered).bit_count())
        chosen.add(best)
        uncovered &= ~covers[best]
    return chosen


def _word(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return "x".join(map(_word, value))
    name = getattr(value, "__name__", None) if callable(value) else None
    return (name or str(value)).removeprefix("torch.").lstrip("_")
