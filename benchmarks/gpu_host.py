"""The host's time of a training step on a GPU, measured without one: launches of Triton kernels do nothing.

    python benchmarks/gpu_host.py
    python benchmarks/gpu_host.py --model densenet121 --turn 1

The shared engine runs with its Triton kernels on the CPU. Each launch of a replay is made as on a GPU, up to Triton's
own launcher in C, in whose place a function does nothing. PyTorch's operations, and so all of plain's, are the CPU's,
on images so small that most of their time is that of the calls. What a GPU adds is missing on both sides: the driver's
part of a launch, cuDNN's host side (here oneDNN's is in its place) and the CUDA allocator. So the ratio is none of a
GPU, but follows what the engine's own Python takes.

The engines take turns of several steps, as a training runs them: the first step after the other engine's finds the
caches of the processor filled by it. `--turn 1` measures that step alone.
"""

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import rows as results
import torch
import torch.nn.functional as F
from gpu_counts import triton_kernels
from methods import architecture, as_list, default_image_size
from options import run_command
from worker import device_name

from efficient_densenet import DenseNet
from efficient_densenet.engine.recording import program, programs
from efficient_densenet.kernels.triton_gpu.host import launch


@contextlib.contextmanager
def idle_launches() -> Iterator[list[int]]:
    """Inside, Triton kernels are chosen on the CPU, and launching one does nothing. Yields a list with their number.

    What was recorded outside is not replayed inside, and what was recorded inside not outside."""
    count = [0]

    def run(*_: Any) -> None:
        count[0] += 1

    def launcher(prepared: launch.Launch, *_: Any) -> tuple[Any, ...]:
        return run, (*prepared.grid, 1, 1)[:3], 0, None, (*prepared.numbers, *prepared.constants.values())

    def first_gpu(*_: Any) -> int:  # a mock would take longer
        return 0

    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=first_gpu))
    with (
        triton_kernels(),
        mock.patch.multiple(launch, _launcher=launcher, _launch_by_triton=run, driver=driver),
        mock.patch.object(torch.Tensor, "get_device", first_gpu),
        mock.patch.object(torch.cuda, "current_device", first_gpu),
        mock.patch.object(program, "WITHOUT_CACHE", set()),  # temporaries in a slab, as on a GPU
    ):
        programs.forget()
        try:
            yield count
        finally:
            programs.forget()


@contextlib.contextmanager
def one_thread_without_collections() -> Iterator[None]:
    """Inside, PyTorch computes in one thread, and Python collects no garbage, which would take as long as a step."""
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()


def step(network: DenseNet, images: torch.Tensor) -> float:
    """The seconds of a training step whose gradients are None before."""
    network.zero_grad()
    labels = torch.zeros(len(images), dtype=torch.long)
    start = time.perf_counter()
    F.cross_entropy(network(images), labels).backward()
    return time.perf_counter() - start


def measure(
    model: str | list[str] = "densenet_bc_100_12,densenet121",
    batch_size: int = 2,
    image_size: int = 0,
    turn: int | list[int] = (8, 1),
    rounds: int = 15,
    missing: bool = False,
    file: str = "",
) -> None:
    """Print the medians of the engines' turns, and write them to a CSV file, in which they replace their former row.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>.
        batch_size: number of images.
        image_size: height and width of the images, which change nothing but what the CPU computes. Default: the
            smallest usual ones, 8 or 32.
        turn: steps of an engine in each round.
        rounds: turns of each engine.
        missing: measure what this commit has not measured yet, and leave rows of other commits out of the file.
        file: where to write. Default: gpu_host_torch<version>.csv in benchmarks/results.
    """
    path = Path(file) if file else results.RESULTS / f"gpu_host_torch{torch.__version__.partition('+')[0]}.csv"
    key = "model", "batch_size", "image_size", "turn"
    for name, steps in itertools.product(as_list(model), as_list(turn)):
        size = image_size or (8 if default_image_size(name) == 32 else 32)
        rows = results.read_others(path, "turn")
        rows = results.of_this_commit(rows) if missing else rows
        others = [
            row for row in rows if [row[column] for column in key] != [name, *map(str, (batch_size, size, steps))]
        ]
        if not missing or others == rows:
            results.write(path, [*others, _row(name, batch_size, size, steps, rounds)])


def _row(model: str, batch_size: int, image_size: int, turn: int, rounds: int) -> dict[str, Any]:
    images = torch.randn(batch_size, 3, image_size, image_size)
    networks = {engine: DenseNet(**architecture(model), efficient=engine) for engine in ("plain", "shared")}
    times: dict[str, list[float]] = {engine: [] for engine in networks}
    with idle_launches() as count, one_thread_without_collections():
        for network in networks.values():  # the first steps are direct and recorded
            for _ in range(2):
                step(network, images)
        for _ in range(rounds):
            for engine, network in networks.items():
                count[0] = 0
                times[engine].append(statistics.mean(step(network, images) for _ in range(turn)))
            gc.collect()
    ratios = [ours / plain for plain, ours in zip(*times.values(), strict=True)]
    row = {
        "model": model,
        "batch_size": batch_size,
        "image_size": image_size,
        "turn": turn,
        "launches": count[0] // turn,
        **{f"{engine}_ms": f"{1000 * statistics.median(each):.2f}" for engine, each in times.items()},
        **results.quartiles("time_over_plain", ratios, 3),
        "rounds": rounds,
        "device_name": device_name(torch.device("cpu")),
        **results.provenance(),
    }
    print(f"{model}, {row['launches']} launches of Triton kernels, torch {torch.__version__}:")
    print(f"plain {row['plain_ms']} ms, shared {row['shared_ms']} ms, {statistics.median(ratios):.2f} of plain's")
    return row


if __name__ == "__main__":
    run_command(measure)
