"""Host time: a training step on images so small that Python and PyTorch's dispatcher take longer than the arithmetic.

    python benchmarks/host_cost.py
    python benchmarks/host_cost.py --kernels portable --rounds 50

Plain and the shared engine take one step each in turn, on one thread, so that a ratio compares two steps of the same
round. Writes a CSV file to benchmarks/results with a row for each set of kernels.
"""

import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import rows
import torch
from checkpointing_costs import interleaved_times
from options import run_command
from settings import architecture, as_list

from efficient_densenet import DenseNet
from efficient_densenet import kernels as kernel_sets

DEVICES = {"numba": "cpu", "portable": "cpu", "triton": "cuda"}
"""The sets of kernels, and where each is measured."""


def measure(
    kernels: Any = "numba,portable",
    model: str = "densenet_bc_100_12",
    batch_size: int = 2,
    image_size: int = 8,
    rounds: int = 30,
) -> None:
    """Measure the host time of a step with each set of kernels, and write a CSV file.

    Args:
        kernels: numba, portable, triton (on a GPU), or several of them.
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>.
        batch_size: number of images.
        image_size: height and width of the images.
        rounds: number of timed steps of each engine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = [_measure(name, model, batch_size, image_size, rounds) for name in as_list(kernels)]
    finally:
        torch.set_num_threads(threads)
    path = rows.RESULTS / f"host_cost_torch{torch.__version__.split('+')[0]}.csv"
    rows.write(path, measured)


def _measure(kernels: str, model: str, batch_size: int, image_size: int, rounds: int) -> dict[str, Any]:
    if kernels not in DEVICES:
        raise ValueError(f"unknown kernels {kernels!r}: there are {', '.join(DEVICES)}")
    if kernels == "triton" and not torch.cuda.is_available():
        raise ValueError("the triton kernels need a GPU, found none: give numba or portable")
    images = torch.randn(batch_size, 3, image_size, image_size, device=DEVICES[kernels])
    with _only_portable(kernels == "portable"):
        found = kernel_sets.kernel_set_name(images).lower()
        if found != kernels:
            raise ValueError(f"the {kernels} kernels cannot run here, found {found} ones: give --kernels {found}")
        steps = {engine: _step(model, engine, images) for engine in ("plain", "shared")}
        times = interleaved_times(steps, rounds)
    ratios = [shared / plain for shared, plain in zip(times["shared"], times["plain"], strict=True)]
    row = {
        "model": model,
        "kernels": kernels,
        "batch_size": batch_size,
        "image_size": image_size,
        "plain_ms": round(statistics.median(times["plain"]) * 1000, 2),
        "shared_ms": round(statistics.median(times["shared"]) * 1000, 2),
        "shared_over_plain": round(statistics.median(ratios), 3),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        **rows.provenance(),
    }
    print(row)
    return row


def _only_portable(portable: bool) -> Any:
    """Without Numba within, or as it was."""
    numba_supports = (lambda values: False) if portable else kernel_sets.numba_supports
    return mock.patch.object(kernel_sets, "numba_supports", numba_supports)


def _step(model: str, engine: str, images: torch.Tensor) -> Callable[[], None]:
    torch.manual_seed(0)
    network = DenseNet(**architecture(model), efficient=engine).to(images.device)
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def step() -> None:
        for parameter in network.parameters():
            parameter.grad = None
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        if images.is_cuda:
            torch.cuda.synchronize()

    return step


if __name__ == "__main__":
    run_command(measure)
