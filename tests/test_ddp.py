"""DistributedDataParallel with its options: plain's numbers by the shared engine, reduced during the backward."""

import functools
from pathlib import Path

import ddp_steps
import pytest
from ddp_steps import SIDES, WAYS
from forks import outcomes_of_processes

ALL = [f"{model} | {way}" for model in SIDES for way in WAYS]
QUICK = [*(f"ours | {way}" for way in WAYS), "converted | usual", "converted | joined"]


_outcomes = functools.partial(outcomes_of_processes, script=Path(ddp_steps.__file__))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict[str, str]]:
    return _outcomes(QUICK, 2, folder=tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("case", QUICK)
def test_steps_of_two_processes_equal_plain_s(case, outcomes):
    assert [of_rank[case] for of_rank in outcomes] == ["equal, by shared"] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 3])
def test_steps_of_several_processes_equal_plain_s(processes, tmp_path):
    for of_rank in _outcomes(ALL, processes, folder=tmp_path):
        assert {case: outcome for case, outcome in of_rank.items() if outcome != "equal, by shared"} == {}
