"""Time and memory of checkpointing beside `torch.utils.checkpoint`.

The time is that of a training step of 40 tiny layers, where Python overhead dominates. The implementations take one
step each in turn, so that a ratio compares two steps of the same round. The memory is the tensor peak of a step of 8
large layers.
"""

import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet.checkpoint import checkpoint
from efficient_densenet.memory import tensor_peak

WARM_UP_ROUNDS = 5
IMPLEMENTATIONS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "plain": lambda module, x: module(x),
    "ours": checkpoint,
    "torch": lambda module, x: torch_checkpoint(module, x, use_reentrant=False),
    "torch, reentrant": lambda module, x: torch_checkpoint(module, x, use_reentrant=True),
}


def measure_costs(rounds: int) -> list[dict[str, Any]]:
    """Return one row for each implementation, with its ratios to `torch.utils.checkpoint`."""
    tiny = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(40)]
    large = [nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()) for _ in range(8)]
    steps = {name: _step(tiny, call, torch.randn(4, 8)) for name, call in IMPLEMENTATIONS.items()}
    times = interleaved_times(steps, rounds)
    peaks = {name: _peak(_step(large, call, torch.randn(2048, 512))) for name, call in IMPLEMENTATIONS.items()}
    rows = []
    for name in IMPLEMENTATIONS:
        ratios = [seconds / torch_seconds for seconds, torch_seconds in zip(times[name], times["torch"], strict=True)]
        rows.append(
            {
                "implementation": name,
                "tiny_layers_ms": round(statistics.median(times[name]) * 1000, 2),
                "time_over_torch": round(statistics.median(ratios), 3),
                "large_layers_peak_mib": round(peaks[name] / 2**20, 2),
                "peak_over_torch": round(peaks[name] / peaks["torch"], 4),
                "rounds": rounds,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "date": datetime.date.today().isoformat(),
            }
        )
        print(rows[-1])
    return rows


def _step(modules: Sequence[nn.Module], call: Callable[[nn.Module, Tensor], Any], x: Tensor) -> Callable[[], None]:
    def step() -> None:
        y = x.requires_grad_()
        for module in modules:
            y = call(module, y)
        y.sum().backward()

    return step


def interleaved_times(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + WARM_UP_ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if i >= WARM_UP_ROUNDS:
                times[name].append(time.perf_counter() - start)
    return times


def _peak(step: Callable[[], None]) -> int:
    step()  # allocates the gradients, which count for no implementation
    return tensor_peak(step)
