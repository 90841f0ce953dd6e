"""How far training steps of two replicas overlap in two threads, as those of `nn.DataParallel` run.

    python benchmarks/replicas.py --model densenet_bc_100_12 --batch_size 16

Each replica computes in one thread. Prints the time of both steps in two threads over that of one after the other, the
median of alternating rounds: 0.5 if nothing waits, 1 if everything does.
"""

import statistics
import threading
import time
from collections.abc import Callable

import torch
from methods import architecture, default_image_size
from options import run_command

from efficient_densenet import DenseNet


def overlap(model: str = "densenet_bc_100_12", batch_size: int = 16, rounds: int = 7) -> None:
    """Print the ratio for each engine.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>.
        batch_size: images of each replica.
        rounds: how often both orders are timed.
    """
    torch.set_num_threads(1)
    x = torch.randn(batch_size, 3, *[default_image_size(model)] * 2)
    for engine in ("plain", "checkpoint", "shared"):
        replicas = [DenseNet(**architecture(model) | {"efficient": engine}) for _ in range(2)]
        steps = [lambda replica=replica: replica(x).sum().backward() for replica in replicas]
        in_sequence, in_threads = [], []
        for _ in range(rounds + 1):  # the first is the warm-up
            in_sequence.append(_seconds(lambda steps=steps: [step() for step in steps]))
            in_threads.append(_seconds(lambda steps=steps: _run_in_threads(steps)))
        medians = [statistics.median(times[1:]) for times in (in_threads, in_sequence)]
        print(f"{engine}: {medians[0]:.2f} s in threads, {medians[1]:.2f} s in sequence: {medians[0] / medians[1]:.2f}")


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _run_in_threads(functions: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    run_command(overlap)
