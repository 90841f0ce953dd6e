"""The host's time of a training step on a GPU, measured without one: launches of Triton kernels do nothing.

    python benchmarks/gpu_host.py --model densenet_bc_100_12

The shared engine runs with its Triton kernels on the CPU. Each launch of a replay is made as on a GPU, up to Triton's
own launcher in C, in whose place a function does nothing. PyTorch's operations, and so all of plain's, are the CPU's,
on images so small that most of their time is that of the calls. What a GPU adds is missing on both sides: the driver's
part of a launch, cuDNN's host side (here oneDNN's is in its place) and the CUDA allocator. So the ratio is none of a
GPU, but follows what the engine's own Python takes.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_counts import triton_kernels
from methods import architecture
from options import run_command

from efficient_densenet import DenseNet
from efficient_densenet.engine.recording import program
from efficient_densenet.kernels.triton_gpu.host import launch


@contextlib.contextmanager
def idle_launches() -> Iterator[list[int]]:
    """Inside, Triton kernels are chosen on the CPU, and launching one does nothing. Yields a list with their number."""
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
        yield count


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


def measure(model: str = "densenet_bc_100_12", batch_size: int = 2, image_size: int = 8, rounds: int = 31) -> None:
    """Print the medians of steps that alternate.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>.
        batch_size: number of images.
        image_size: height and width of the images, which change nothing but what the CPU computes.
        rounds: steps of each engine.
    """
    images = torch.randn(batch_size, 3, image_size, image_size)
    plain, shared = (DenseNet(**architecture(model), efficient=engine) for engine in ("plain", "shared"))
    times: dict[str, list[float]] = {"plain": [], "shared": []}
    with idle_launches() as count, one_thread_without_collections():
        for i in range(rounds + 2):  # the first steps are direct and recorded
            count[0] = 0
            of_round = {"plain": step(plain, images), "shared": step(shared, images)}
            for engine, seconds in of_round.items() if i > 1 else ():
                times[engine].append(seconds)
            gc.collect()
    medians = {engine: statistics.median(each) for engine, each in times.items()}
    ratios = sorted(ours / theirs for ours, theirs in zip(times["shared"], times["plain"], strict=True))
    quarter = len(ratios) // 4
    print(f"{model}, {count[0]} launches of Triton kernels, torch {torch.__version__}:")
    print(f"plain {1000 * medians['plain']:.1f} ms, shared {1000 * medians['shared']:.1f} ms,", end=" ")
    print(f"{statistics.median(ratios):.2f} ({ratios[quarter]:.2f}-{ratios[-1 - quarter]:.2f}) of plain's")


if __name__ == "__main__":
    run_command(measure)
