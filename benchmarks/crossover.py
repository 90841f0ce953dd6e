"""Is `efficient=True` ever slower than plain? Time and memory of steps of all sizes on a CPU, relative to plain's.

    python benchmarks/crossover.py --allocator tcmalloc                       all points, in about 12 minutes
    python benchmarks/crossover.py --allocator tcmalloc --missing             what this commit has not measured yet
    python benchmarks/crossover.py --points "densenet121 2 x 48^3" --threads 1

In each round one process takes steps of plain, of `efficient=True` with Numba's kernels, and of it without them, and
compares their times. With one thread these are CPU seconds, which other processes hardly change. The command fails if
a point takes longer than plain. `python benchmarks/plot.py` draws its file.
"""

import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import rows as results
import torch
from comparison import find_allocator
from methods import architecture, as_list
from options import run_command
from worker import allocator as allocator_name
from worker import device_name

from efficient_densenet import DenseNet, kernels
from efficient_densenet.memory import tensor_peak

SIZES = (
    ("densenet_bc_100_12", (2, 32), (64, 512, 4096), 1),
    ("densenet_bc_100_12", (2, 8, 64), (8, 16, 32), 2),
    ("densenet_bc_100_12", (2,), (64, 128), 2),
    ("densenet_bc_100_12", (2,), (8, 16, 32), 3),
    ("densenet121", (2, 16), (256, 1024, 8192), 1),
    ("densenet121", (2, 8), (32, 64, 128, 224), 2),
    ("densenet121", (16,), (224,), 2),
    ("densenet121", (2,), (32, 48, 64), 3),
    ("densenet121", (1,), (64, 96), 3),
)
POINTS = [f"{model} {n} x {side}^{dims}" for model, batches, sides, dims in SIZES for n in batches for side in sides]
MIN_ROUNDS, MAX_ROUNDS = 5, 60
TURN = 0.1
"""Seconds that a turn takes at least: the first of several short steps finds the others' data in the caches."""


def crossover(
    points: str | list[str] = POINTS,
    seconds: float = 4,
    threads: int = 0,
    allocator: str = "",
    missing: bool = False,
    file: str = "",
) -> None:
    """Measure points, write them to a CSV file, in which they replace their former rows, and print the slow ones.

    Args:
        points: `MODEL BATCH x SIDE^DIMENSIONS`, joined by commas. Default: all of `POINTS`.
        seconds: how long each is measured, or longer for five rounds.
        threads: number of CPU threads. Default: PyTorch's.
        allocator: tcmalloc, jemalloc or the path of a library to preload.
        missing: measure what this commit has not measured yet, and leave rows of other commits out of the file.
        file: where to write. Default: cpu_torch<version>_crossover.csv in benchmarks/results.
    """
    preload = find_allocator(allocator)
    if preload and preload not in os.environ.get("LD_PRELOAD", ""):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": preload})
    if threads:
        torch.set_num_threads(threads)
    path = Path(file) if file else results.RESULTS / f"cpu_torch{torch.__version__.partition('+')[0]}_crossover.csv"
    measured = results.read_others(path, "point")
    measured = results.of_this_commit(measured) if missing else measured
    for point in as_list(points):
        if missing and any(row["point"] == point for row in measured):
            continue
        new = measure(point, seconds)
        print(*(f"{point} {row['kernels']}: time {row['time']}, memory {row['memory']}" for row in new), sep="\n")
        measured = [row for row in measured if row["point"] != point] + new
        results.write(path, measured)
    slow = [f"{row['point']} {row['kernels']} {row['time']}" for row in measured if float(row["time"]) > 1]
    if slow:
        raise ValueError(f"slower than plain: {', '.join(slow)}")


def measure(point: str, seconds: float) -> list[results.Row]:
    """A row for each set of kernels."""
    match = re.fullmatch(r"(\w+) (\d+) x (\d+)\^([123])", point)
    if match is None:
        raise ValueError(f"unknown point {point!r}: take one such as {POINTS[0]!r}")
    model, (batch, side, dims) = match[1], map(int, match.groups()[1:])
    steps = {name: _step(model, batch, side, dims, name) for name in ("plain", "numba", "portable")}
    if not kernels.numba_supports(torch.empty(0)):
        del steps["numba"]
    peaks = {}
    for name, step in steps.items():
        for _ in range(3):  # the third step replays what the second has recorded
            step()
        peaks[name] = tensor_peak(lambda step=step: step(accumulates=True))
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while len(times["plain"]) < MIN_ROUNDS or (time.perf_counter() < end and len(times["plain"]) < MAX_ROUNDS):
        for name, step in steps.items():
            count = int(TURN / times["plain"][0]) + 1 if times["plain"] else 1
            start = clock()
            for _ in range(count):
                step()
            times[name].append((clock() - start) / count)
    return [_row(point, name, times, peaks) for name in steps if name != "plain"]


def _step(model: str, batch: int, side: int, dims: int, name: str) -> Any:
    torch.manual_seed(0)
    network = DenseNet(**architecture(model), efficient=name != "plain", dims=dims)
    x = torch.randn(batch, 3, *(side,) * dims)
    supports = kernels.numba_supports if name != "portable" else lambda values: False

    def step(accumulates: bool = False) -> None:
        before, kernels.numba_supports = kernels.numba_supports, supports
        network.zero_grad(set_to_none=not accumulates)
        network(x).logsumexp(1).mean().backward()
        kernels.numba_supports = before

    return step


def _row(point: str, name: str, times: dict[str, list[float]], peaks: dict[str, int]) -> results.Row:
    ratios = [ours / plain for ours, plain in zip(times[name], times["plain"], strict=True)]
    values = {
        "point": point,
        "kernels": name,
        "time": f"{statistics.median(ratios):.2f}",
        "memory": f"{peaks[name] / peaks['plain']:.2f}",
        "plain_ms": f"{statistics.median(times['plain']) * 1000:.1f}",
        "plain_mib": f"{peaks['plain'] / 2**20:.1f}",
        "rounds": len(ratios),
        "threads": torch.get_num_threads(),
        "allocator": allocator_name(),
        "device_name": device_name(torch.device("cpu")),
        **results.provenance(),
    }
    return {column: str(value) for column, value in values.items()}


if __name__ == "__main__":
    run_command(crossover)
