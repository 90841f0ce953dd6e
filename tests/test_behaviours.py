"""The probes of checkpointing: ours behaves as the plain call, and the documented cells are those of the benchmark."""

import csv
from pathlib import Path

import checkpointing as benchmark
import pytest
from checkpointing_probes import PROBES, WRAPPERS, a_recomputation_that_differs_is_an_error
from options import run_command

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("probe", PROBES)
def test_ours_behaves_as_the_plain_call(probe):
    if probe is not a_recomputation_that_differs_is_an_error:  # the plain call has no recomputation
        assert probe(lambda module: module)
    assert probe(WRAPPERS["ours"])


def test_the_documented_behaviours_are_the_benchmark_s():
    with (ROOT / "benchmarks/results/checkpointing_behaviours_torch2.14.1.csv").open() as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows[1:]] == [probe.__name__.replace("_", " ") for probe in PROBES]
    page = (ROOT / "docs" / "checkpoint.md").read_text()
    for row in rows[1:]:
        assert f"| {' | '.join(row)} |" in page


@pytest.mark.exhaustive
def test_the_benchmark_is_a_command(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark.results, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["checkpointing.py", "costs", "--rounds", "2"])
    run_command(benchmark.measure)
    (path,) = tmp_path.glob("checkpointing_costs_torch*.csv")
    with path.open() as file:
        rows = {row["implementation"]: row for row in csv.DictReader(file)}
    assert (rows["torch"]["time_over_torch"], rows["torch"]["peak_over_torch"]) == ("1.0", "1.0")
    assert rows["ours"]["rounds"] == "2"
    assert 0.9 < float(rows["ours"]["peak_over_torch"]) < 1.1 < float(rows["plain"]["peak_over_torch"])
    monkeypatch.setattr("sys.argv", ["checkpointing.py", "cost"])
    with pytest.raises(SystemExit, match="error: found cost: give behaviours or costs"):
        run_command(benchmark.measure)
