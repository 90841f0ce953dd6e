"""The benchmark of the first compiled step: what is kept for each, its row, and a real one."""

import csv
from pathlib import Path

import compile_time as benchmark
import pytest


@pytest.fixture
def started(monkeypatch) -> list[tuple[str, int]]:
    """The methods of the workers, each with how much was kept for it; a worker keeps one file, and a function none."""
    workers = []

    class Worker:
        def __init__(self, method, setting, timeout, compiler_cache):
            kept = Path(compiler_cache)
            workers.append((method, len(list(kept.iterdir()))))
            (kept / "model").touch()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def receive(self):
            pass

        def request(self, command):
            assert command == "prepare"
            return {"first_step_s": 10.0 * len(workers)}

    monkeypatch.setattr(benchmark, "WorkerProcess", Worker)
    monkeypatch.setattr(benchmark, "ANY_FUNCTION", "print(2)")
    return workers


def test_what_is_kept_for_each_step(started, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark.rows, "RESULTS", tmp_path)
    benchmark.measure("densenet_bc_10_4", engines="shared,plain", threads=1)
    assert started == [(f"compile_{engine}", kept) for engine in ("shared", "plain") for kept in (0, 1, 0)]
    (path,) = tmp_path.glob("compile_time_torch*_densenet_bc_10_4.csv")
    with path.open(newline="") as file:
        shared, plain = csv.DictReader(file)
    assert (shared["engine"], plain["engine"]) == ("shared", "plain")
    steps = [shared[f"first_step_{kept}_s"] for kept in ("nothing_kept", "model_kept", "any_function_kept")]
    assert steps == ["10.0", "20.0", "30.0"]
    assert shared["any_function_nothing_kept_s"] == "2.0"
    with pytest.raises(ValueError, match="unknown engine 'official': there are plain and shared"):
        benchmark.measure("densenet_bc_10_4", engines="official")


@pytest.mark.exhaustive
def test_a_model_that_was_compiled_before_takes_less_time(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark.rows, "RESULTS", tmp_path)
    benchmark.measure("densenet_bc_10_4", batch_size=2)
    (path,) = tmp_path.glob("*.csv")
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert 0 < float(row["first_step_model_kept_s"]) < float(row["first_step_nothing_kept_s"])
