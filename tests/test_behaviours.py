"""The probes of checkpointing: ours behaves as the plain call, and the documented cells are those of the benchmark."""

import csv
from pathlib import Path

import pytest
from checkpointing_probes import PROBES, WRAPPERS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("probe", PROBES)
def test_ours_behaves_as_the_plain_call(probe):
    assert probe(lambda module: module)
    assert probe(WRAPPERS["ours"])


def test_the_documented_behaviours_are_the_benchmark_s():
    with (ROOT / "benchmarks/results/checkpointing_behaviours_torch2.14.1.csv").open() as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows[1:]] == [probe.__name__.replace("_", " ") for probe in PROBES]
    page = (ROOT / "docs" / "checkpoint.md").read_text()
    assert all(f"| {' | '.join(row)} |" in page for row in rows[1:])
