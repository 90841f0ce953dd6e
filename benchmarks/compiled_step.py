"""A training step of the shared engine, compiled and eager: time and memory, in one process.

    python benchmarks/compiled_step.py
    python benchmarks/compiled_step.py --model densenet121 --batch_size 16

Two processes of one method differ by a few percent, which is what is to be measured here; `run.py` compares processes.
Eager and compiled take one step each in turn. Writes a CSV file to benchmarks/results with a row for each of them.
"""

import statistics
from typing import Any

import rows
import torch
from checkpointing_costs import interleaved_times
from options import run_command
from settings import Setting, expand
from worker import Training, allocator

METHODS = {"eager": "shared", "compiled": "compile_shared"}


def measure(
    model: str = "densenet_bc_100_12",
    batch_size: int = 64,
    precision: str = "float32",
    threads: int = 0,
    rounds: int = 15,
) -> None:
    """Measure a step of the shared engine, compiled and eager, and write a CSV file.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>.
        batch_size: number of images.
        precision: float32, bf16 or fp16.
        threads: of PyTorch. Default: as many as it takes by itself.
        rounds: number of timed steps of each.
    """
    (setting,) = expand(model, batch_size, precision=precision, threads=threads)
    measured = _rows(setting, rounds)
    name = f"compiled_step_torch{torch.__version__.split('+')[0]}_{model}_{batch_size}_{precision}.csv"
    rows.write(rows.RESULTS / name, measured)


def _rows(setting: Setting, rounds: int) -> list[dict[str, Any]]:
    trainings = {name: Training(method, setting) for name, method in METHODS.items()}
    answers = {name: training.prepare() for name, training in trainings.items()}
    times = interleaved_times({name: training.step for name, training in trainings.items()}, rounds)
    ratios = [compiled / eager for compiled, eager in zip(times["compiled"], times["eager"], strict=True)]
    measured = [
        {
            "model": setting.model,
            "step": name,
            "kernels": answers[name]["kernels"],
            "batch_size": setting.batch_size,
            "precision": setting.precision,
            "step_s_median": f"{statistics.median(times[name]):.4f}",
            "over_eager_median": f"{statistics.median(ratios):.3f}" if name == "compiled" else "1.000",
            "tensor_peak_mib": f"{answers[name]['tensor_peak'] / 2**20:.1f}",
            "step_peak_mib": f"{answers[name]['step_peak'] / 2**20:.1f}",
            "rounds": rounds,
            "allocator": allocator(),
            "device_name": answers[name]["device_name"],
            "threads": setting.threads,
            **rows.provenance(),
        }
        for name in METHODS
    ]
    for row in measured:
        print(row)
    return measured


if __name__ == "__main__":
    run_command(measure)
