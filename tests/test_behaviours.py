"""The README's comparison: ours behaves as it says there, and every cell is one that the benchmark wrote."""

import csv
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _benchmark():
    spec = importlib.util.spec_from_file_location("checkpointing", ROOT / "benchmarks" / "checkpointing.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = _benchmark()


@pytest.mark.parametrize("probe", BENCHMARK.PROBES)
def test_ours_behaves_as_the_plain_call(probe):
    if probe is not BENCHMARK.a_second_run_that_differs_is_an_error:  # the plain call has no second run
        assert probe(lambda module: module)
    assert probe(BENCHMARK.WRAPPERS["ours"])


def test_the_readme_s_cells_are_the_benchmark_s():
    with (ROOT / "benchmarks/results/checkpointing_behaviours_torch2.15.0.csv").open() as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows[1:]] == [probe.__name__.replace("_", " ") for probe in BENCHMARK.PROBES]
    page = (ROOT / "docs" / "checkpoint.md").read_text()
    for row in rows[1:]:
        assert f"| {' | '.join(row)} |" in page


def test_the_readme_s_costs_are_the_benchmark_s():
    with (ROOT / "benchmarks/results/checkpointing_costs_torch2.15.0.csv").open() as file:
        ours = next(row for row in csv.DictReader(file) if row["implementation"] == "ours")
    page = " ".join((ROOT / "docs" / "checkpoint.md").read_text().split())
    assert f"ours takes {float(ours['time_over_torch']):.2f}× of torch's" in page
    assert f"peak of tensor memory ({float(ours['peak_over_torch']):.2f}×;" in page


def test_the_benchmark_is_a_command(monkeypatch):
    done = []
    monkeypatch.setattr(BENCHMARK, "costs", done.append)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # it would stay
    monkeypatch.setattr("sys.argv", ["checkpointing.py", "costs", "--rounds", "7"])
    BENCHMARK.command(BENCHMARK.measure)
    assert done == [7]
    monkeypatch.setattr("sys.argv", ["checkpointing.py", "cost"])
    with pytest.raises(SystemExit, match="error: found cost: give behaviours or costs"):
        BENCHMARK.command(BENCHMARK.measure)
