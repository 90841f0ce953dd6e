"""The tiers of a grid: the first covers all pairs of values, both together are the whole product."""

import itertools

import pytest
from grids import grid

AXES = {"a": range(5), "b": [True, False], "c__d": [(1, "x"), (2, "x"), (1, "y")], "e": [None, 0.0, "0"]}


def _valid(a, b, c, d, e):
    return not (b and d == "y") and not (a == 4 and e is not None)


def _pairs(rows):
    return {(i, row[i], j, row[j]) for row in rows for i, j in itertools.combinations(range(len(row)), 2)}


@pytest.mark.parametrize("where", [None, _valid])
def test_first_tier_covers_every_pair_and_both_tiers_are_the_product(where):
    names, params = grid(where, **AXES)
    assert names == "a,b,c,d,e"
    product = [(a, b, c, d, e) for a, b, (c, d), e in itertools.product(*AXES.values())]
    expected = [row for row in product if where is None or where(*row)]
    assert [param.values for param in params] == expected
    first_tier = [param.values for param in params if not param.marks]
    assert _pairs(first_tier) == _pairs(expected)
    assert len(first_tier) < len(expected) / 3
    assert len({param.id for param in params}) == len(params)
