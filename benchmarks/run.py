"""What a training step holds and takes with each engine, as ratios to plain in the same run.

    python benchmarks/run.py --model densenet_bc_100_12 --batch_size 64 --rounds 7

Engines take turns, a step each, so that a drift of the machine's speed meets them alike; times are medians of the
rounds after a warm-up. The peak is the most that tensors held during a step, above what they held before it; kept bytes
are what autograd holds between forward and backward, counted by saved-tensor hooks on the meta device.
"""

import csv
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from efficient_densenet import create_model
from efficient_densenet.memory import saved_bytes, tensor_peak
from efficient_densenet.training.command_line import command

RESULTS = Path(__file__).parent / "results"
ENGINES = ("plain", "official", "checkpoint", "shared")


def run(model: str = "densenet_bc_100_12", batch_size: int = 64, image_size: int = 32, rounds: int = 7) -> None:
    """Measure every engine and write benchmarks/results/<device>_torch<version>_<model>_<batch>.csv."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (batch_size, 3, image_size, image_size)
    steps = _steps(model, shape, device)
    peaks = {engine: tensor_peak(step, device) for engine, step in steps.items()}
    times = _alternating(steps, rounds, device)
    rows = []
    for engine in ENGINES:
        quartiles = statistics.quantiles(times[engine], n=4)
        ratios = [ours / plain for ours, plain in zip(times[engine], times["plain"], strict=True)]
        rows.append(
            {
                "model": model,
                "engine": engine,
                "batch_size": batch_size,
                "image_size": image_size,
                "precision": "float32",
                "peak_mib": round(peaks[engine] / 2**20),
                "peak_over_plain": round(peaks[engine] / peaks["plain"], 3),
                "kept_mib": round(_kept(model, engine, shape) / 2**20),
                "step_s_median": round(quartiles[1], 4),
                "step_s_q1": round(quartiles[0], 4),
                "step_s_q3": round(quartiles[2], 4),
                "time_over_plain": round(statistics.median(ratios), 3),
                "rounds": rounds,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "date": datetime.date.today().isoformat(),
            }
        )
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items() if key in _SHOWN))
    _write(rows, device)


_SHOWN = ("engine", "peak_mib", "peak_over_plain", "kept_mib", "step_s_median", "time_over_plain")


def _steps(name: str, shape: tuple[int, ...], device: torch.device) -> dict[str, Callable[[], None]]:
    """A training step's forward and backward by each engine; all have run once, so that gradients are there."""
    model = create_model(name).to(device)
    images = torch.randn(shape, device=device)
    labels = torch.zeros(shape[0], dtype=torch.long, device=device)

    def step(engine: str) -> None:
        model.set_engine(engine)
        F.cross_entropy(model(images), labels).backward()

    steps = {engine: partial(step, engine) for engine in ENGINES}
    for warm_up in steps.values():
        warm_up()
    return steps


def _alternating(steps: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {engine: [] for engine in steps}
    for _ in range(rounds):
        for engine, step in steps.items():
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[engine].append(time.perf_counter() - start)
    return times


def _kept(name: str, engine: str, shape: tuple[int, ...]) -> int:
    model = create_model(name, efficient=engine).to("meta")
    images, labels = torch.empty(shape, device="meta"), torch.empty(shape[0], dtype=torch.long, device="meta")
    return saved_bytes(lambda: F.cross_entropy(model(images), labels))


def _write(rows: list[dict], device: torch.device) -> None:
    first = rows[0]
    version = torch.__version__.split("+")[0]
    path = RESULTS / f"{device.type}_torch{version}_{first['model']}_{first['batch_size']}.csv"
    RESULTS.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(first))
        table.writeheader()
        table.writerows(rows)
    print(f"wrote {path}")


if __name__ == "__main__":
    command(run)
