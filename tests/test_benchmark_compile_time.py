"""The benchmark of the first compiled step: the caches of its processes, its rows, and a real one."""

import csv
from pathlib import Path

import compile_time as benchmark
import pytest
from comparison import MethodError, WorkerProcess
from settings import expand

COMPILED = "import os; open(os.path.join(os.environ['TORCHINDUCTOR_CACHE_DIR'], 'function'), 'w'); print(2)"


@pytest.fixture
def prepared(monkeypatch, tmp_path) -> list[tuple[str, list[str]]]:
    """The method of each worker, with what its cache had; a worker adds a file."""
    calls = []

    def prepare(method, setting, cache=""):
        calls.append((method, sorted(path.name for path in Path(cache).iterdir()) if cache else []))
        if cache:
            (Path(cache) / "step").touch()
        return {"first_step_s": float(len(calls)), "kernels": "Numba", "device_name": "a processor"}

    monkeypatch.setattr(benchmark, "_prepare", prepare)
    monkeypatch.setattr(benchmark, "TRIVIAL_FUNCTION", COMPILED)
    monkeypatch.setattr(benchmark.rows, "RESULTS", tmp_path)
    return calls


def test_the_caches_and_the_rows(prepared, tmp_path):
    benchmark.measure("densenet_bc_10_4", engines="shared,plain", threads=1, rounds=1)
    for engine, calls in (("shared", prepared[:4]), ("plain", prepared[4:])):
        steps = [(f"compile_{engine}", cache) for cache in ([], ["function"], ["function", "step"])]
        assert calls == [(engine, []), *steps]
    (path,) = tmp_path.glob("compile_time_torch*_densenet_bc_10_4_64.csv")
    with path.open(newline="") as file:
        shared, plain = csv.DictReader(file)
    assert (shared["engine"], plain["engine"], shared["kernels"]) == ("shared", "plain", "Numba")
    kinds = "first_step_cold_s", "trivial_function_cold_s", "first_step_after_trivial_function_s", "first_step_warm_s"
    assert [shared[kind] for kind in kinds] == ["2.0", "2.0", "3.0", "4.0"]


def test_what_cannot_be_measured(prepared, monkeypatch):
    with pytest.raises(ValueError, match="unknown engine 'official': there are plain and shared"):
        benchmark.measure("densenet_bc_10_4", engines="official")
    monkeypatch.setattr(benchmark, "TRIVIAL_FUNCTION", "raise OSError('no compiler')")
    with pytest.raises(ValueError, match=r"torch.compile does not work here: OSError: no compiler"):
        benchmark.measure("densenet_bc_10_4")


def test_a_worker_takes_the_cache_that_it_is_given(tmp_path, monkeypatch):
    (setting,) = expand("densenet_bc_10_4", 2, threads=1)
    with WorkerProcess("plain", setting, compiler_cache=str(tmp_path)) as worker:
        environment = Path(f"/proc/{worker.process.pid}/environ")
        if not environment.exists():
            pytest.skip("needs /proc")
        worker.receive()  # now it has begun: the environment of a process that is just made is empty
        assert f"TORCHINDUCTOR_CACHE_DIR={tmp_path}" in environment.read_text().split("\0")

    def receive(worker):
        raise MethodError("it is slow")

    monkeypatch.setattr(WorkerProcess, "receive", receive)
    with pytest.raises(ValueError, match="plain could not be measured: it is slow"):
        benchmark._prepare("plain", setting)


@pytest.mark.exhaustive
def test_a_step_that_was_compiled_before_takes_less_time(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark.rows, "RESULTS", tmp_path)
    benchmark.measure("densenet_bc_10_4", batch_size=2, rounds=1)
    (path,) = tmp_path.glob("*.csv")
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert 0 < float(row["first_step_warm_s"]) < float(row["first_step_cold_s"])
