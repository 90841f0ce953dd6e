"""How long does the first step of a compiled model take, with Inductor's cache cold and warm?

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --model densenet121 --batch_size 16 --engines shared,plain

Before the first function of any kind, Inductor probes the C++ compiler and the processor's vector instructions, and
caches the results. A step is compiled with a cold cache; with that of a trivial function; and with that of the same
step. The kernels of Numba are on disk by then. Writes a CSV file to benchmarks/results with a row for each engine.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import rows
import torch
from comparison import MethodError, WorkerProcess
from options import run_command
from settings import Setting, as_list, expand

TRIVIAL_FUNCTION = """
import time, torch
started = time.perf_counter()
torch.compile(lambda x: (x + 1).relu())(torch.ones(1000))
print(time.perf_counter() - started)
"""
TIMEOUT = 1200

Answer = dict[str, Any]
"""Of a worker's `prepare`."""


def measure(
    model: str = "densenet_bc_100_12", batch_size: int = 64, engines: Any = "shared", threads: int = 0, rounds: int = 3
) -> None:
    """Measure the seconds of the first compiled step, and write a CSV file.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>.
        batch_size: number of images.
        engines: plain, shared, or both.
        threads: of PyTorch. Default: as many as it takes by itself.
        rounds: how often each is measured, of which the median counts.
    """
    (setting,) = expand(model, batch_size, threads=threads)
    measured = [_row(engine, setting, rounds) for engine in as_list(engines)]
    name = f"compile_time_torch{torch.__version__.split('+')[0]}_{model}_{batch_size}.csv"
    rows.write(rows.RESULTS / name, measured)


def _row(engine: str, setting: Setting, rounds: int) -> dict[str, Any]:
    if engine not in ("plain", "shared"):
        raise ValueError(f"unknown engine {engine!r}: there are plain and shared")
    answer = _prepare(engine, setting)  # compiles the kernels of Numba, if they are not on disk
    seconds = zip(*(_seconds(f"compile_{engine}", setting) for _ in range(rounds)), strict=True)
    cold, trivial, after_trivial, warm = (f"{statistics.median(each):.1f}" for each in seconds)
    row = {
        "model": setting.model,
        "engine": engine,
        "kernels": answer["kernels"],
        "batch_size": setting.batch_size,
        "trivial_function_cold_s": trivial,
        "first_step_cold_s": cold,
        "first_step_after_trivial_function_s": after_trivial,
        "first_step_warm_s": warm,
        "rounds": rounds,
        "device_name": answer["device_name"],
        "threads": setting.threads,
        **rows.provenance(),
    }
    print(row)
    return row


def _seconds(method: str, setting: Setting) -> tuple[float, float, float, float]:
    """The first step with a cold cache; the trivial function, with another; the step after it; the step once more."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        cold = _prepare(method, setting, cache)["first_step_s"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        trivial = _compile_trivial_function(cache)
        after_trivial, warm = (_prepare(method, setting, cache)["first_step_s"] for _ in range(2))
    return cold, trivial, after_trivial, warm


def _prepare(method: str, setting: Setting, cache: str = "") -> Answer:
    try:
        with WorkerProcess(method, setting, timeout=TIMEOUT, compiler_cache=cache) as worker:
            worker.receive()
            return worker.request("prepare")
    except MethodError as exc:
        raise ValueError(f"{method} could not be measured: {exc}") from exc


def _compile_trivial_function(cache: str) -> float:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-c", TRIVIAL_FUNCTION]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise ValueError(f"torch.compile does not work here: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    return float(done.stdout)


if __name__ == "__main__":
    run_command(measure)
