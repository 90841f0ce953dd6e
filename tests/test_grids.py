"""The two tiers of a grid: pairs in the first, the rest in the exhaustive one, nothing lost."""

import itertools

import pytest
from grids import covering_array, grid

AXES = {"a": range(5), "b": [True, False], "c__d": [(1, "x"), (2, "x"), (1, "y")], "e": [None, 0.0, "0"]}


def _sensible(a, b, c, d, e):
    return not (b and d == "y") and not (a == 4 and e is not None)


def _pairs(rows):
    return {(i, row[i], j, row[j]) for row in rows for i, j in itertools.combinations(range(len(row)), 2)}


@pytest.mark.parametrize("where", [None, _sensible])
def test_the_first_tier_contains_every_pair_that_there_is(where):
    names, params = grid(where, **AXES)
    assert names == "a,b,c,d,e"
    every = [(a, b, c, d, e) for a, b, (c, d), e in itertools.product(*AXES.values())]
    expected = [row for row in every if where is None or where(*row)]
    assert [param.values for param in params] == expected
    first = [param.values for param in params if not param.marks]
    assert _pairs(first) == _pairs(expected)
    assert len(first) <= 17
    assert all(mark.name == "exhaustive" for param in params for mark in param.marks)
    assert len({param.id for param in params}) == len(params)


def test_triples_and_the_same_choice_each_time():
    rows = list(itertools.product(range(3), repeat=4))
    chosen = covering_array(rows, strength=3)
    assert chosen == covering_array(rows, strength=3)
    for columns in itertools.combinations(range(4), 3):
        assert len({tuple(rows[i][c] for c in columns) for i in chosen}) == 27
    assert len(chosen) < 40
    assert len(covering_array(rows)) <= 12
    assert covering_array([]) == set()
