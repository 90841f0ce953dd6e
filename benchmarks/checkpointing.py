"""Compare this package's checkpointing with torch.utils.checkpoint's.

    python benchmarks/checkpointing.py behaviours     does a checkpointed call behave as the plain call? yes or no
    python benchmarks/checkpointing.py costs          time on tiny layers and memory on large ones, beside torch's

Both write a CSV file to benchmarks/results. `behaviours` also prints a Markdown table. The time is for a training
step of 40 tiny layers, where Python takes longest; the implementations take one step each in turn, so that a ratio
compares two steps of the same round. The memory is the tensor peak of a step of 8 large layers.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import rows as results
import torch
from checkpointing_probes import PROBES, WRAPPERS, answer
from options import run_command
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet.checkpoint import checkpoint
from efficient_densenet.memory import tensor_peak

WARM_UP_ROUNDS = 5
IMPLEMENTATIONS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "plain": lambda module, x: module(x),
    "ours": checkpoint,
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "torch, reentrant": partial(torch_checkpoint, use_reentrant=True),
}


def measure(*files: str, rounds: int = 60) -> None:
    """Run the benchmarks and write their CSV files.

    Args:
        files: behaviours, costs or both.
        rounds: number of timed steps in costs.
    """
    if not files or {*files} - {"behaviours", "costs"}:
        raise ValueError(f"found {' '.join(files) or 'no benchmark'}: give behaviours or costs")
    for name in files:
        measured = probe_behaviours() if name == "behaviours" else measure_costs(rounds)
        results.write(results.RESULTS / f"checkpointing_{name}_torch{torch.__version__.split('+')[0]}.csv", measured)


def probe_behaviours() -> list[dict[str, str]]:
    """Run all probes on all implementations, print the table, and return one row for each probe."""
    rows = []
    for probe in PROBES:
        answers = {name: answer(probe, name) for name in WRAPPERS}
        rows.append({"behaviour": probe.__name__.replace("_", " "), **answers})
    print("| | " + " | ".join(WRAPPERS) + " |\n|---|" + ":---:|" * len(WRAPPERS))
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    return rows


def measure_costs(rounds: int) -> list[dict[str, Any]]:
    """Return one row for each implementation, with its ratios to `torch.utils.checkpoint`."""
    tiny = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(40)]
    large = [nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()) for _ in range(8)]
    times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    steps = {name: _step(call, tiny, torch.randn(4, 8)) for name, call in IMPLEMENTATIONS.items()}
    for _ in range(rounds + WARM_UP_ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    peaks = {}
    for name, call in IMPLEMENTATIONS.items():
        step = _step(call, large, torch.randn(2048, 512))
        step()  # allocates the gradients, which count for no implementation
        peaks[name] = tensor_peak(step)
    measured = [_row(name, times, peaks) for name in IMPLEMENTATIONS]
    print(*measured, sep="\n")
    return measured


def _row(name: str, times: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, Any]:
    timed = {each: seconds[WARM_UP_ROUNDS:] for each, seconds in times.items()}
    ratios = [seconds / torch_seconds for seconds, torch_seconds in zip(timed[name], timed["torch"], strict=True)]
    return {
        "implementation": name,
        "tiny_layers_ms": round(statistics.median(timed[name]) * 1000, 2),
        "time_over_torch": round(statistics.median(ratios), 3),
        "large_layers_peak_mib": round(peaks[name] / 2**20, 2),
        "peak_over_torch": round(peaks[name] / peaks["torch"], 4),
        "rounds": len(ratios),
        "threads": torch.get_num_threads(),
        **results.provenance(),
    }


def _step(call: Callable[[nn.Module, Tensor], Any], modules: Sequence[nn.Module], x: Tensor) -> Callable[[], None]:
    def step() -> None:
        y = x.requires_grad_()
        for module in modules:
            y = call(module, y)
        y.sum().backward()

    return step


if __name__ == "__main__":
    run_command(measure)
