"""How long does the first step of a compiled model take, by what is kept from earlier processes?

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --model densenet121 --batch_size 16 --engines shared,plain

Before the first function of any kind, Inductor tries the C++ compiler and the processor's instructions, and keeps what
it finds. A step is compiled where nothing is kept; where any function has been compiled before; and where this model
has. Writes a CSV file to benchmarks/results with a row for each engine.
"""

import datetime
import os
import subprocess
import sys
import tempfile
from typing import Any

import rows
import torch
from comparison import WorkerProcess
from options import run_command
from settings import Setting, as_list, expand

ANY_FUNCTION = """
import time, torch
started = time.perf_counter()
torch.compile(lambda x: (x + 1).relu())(torch.ones(1000))
print(time.perf_counter() - started)
"""
TIMEOUT = 1200


def measure(model: str = "densenet_bc_100_12", batch_size: int = 64, engines: Any = "shared", threads: int = 0) -> None:
    """Measure the seconds of the first compiled step, and write a CSV file.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>.
        batch_size: number of images.
        engines: plain, shared, or both.
        threads: of PyTorch. Default: as many as it takes by itself.
    """
    (setting,) = expand(model, batch_size, threads=threads)
    measured = [_row(engine, setting) for engine in as_list(engines)]
    rows.write(rows.RESULTS / f"compile_time_torch{torch.__version__.split('+')[0]}_{model}.csv", measured)


def _row(engine: str, setting: Setting) -> dict[str, Any]:
    if engine not in ("plain", "shared"):
        raise ValueError(f"unknown engine {engine!r}: there are plain and shared")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kept:
        nothing_kept, model_kept = (_first_step(engine, setting, kept) for _ in range(2))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kept:
        any_function = _compile_any_function(kept)
        compiler_kept = _first_step(engine, setting, kept)
    row = {
        "model": setting.model,
        "engine": engine,
        "batch_size": setting.batch_size,
        "first_step_nothing_kept_s": f"{nothing_kept:.1f}",
        "any_function_nothing_kept_s": f"{any_function:.1f}",
        "first_step_any_function_kept_s": f"{compiler_kept:.1f}",
        "first_step_model_kept_s": f"{model_kept:.1f}",
        "threads": setting.threads,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": rows.commit(),
    }
    print(row)
    return row


def _first_step(engine: str, setting: Setting, kept: str) -> float:
    with WorkerProcess(f"compile_{engine}", setting, timeout=TIMEOUT, compiler_cache=kept) as worker:
        worker.receive()
        return worker.request("prepare")["first_step_s"]


def _compile_any_function(kept: str) -> float:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": kept}
    command = [sys.executable, "-c", ANY_FUNCTION]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    run_command(measure)
