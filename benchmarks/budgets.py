"""The time and the memory of a training step at several budgets: what saved bottlenecks cost and gain.

    python benchmarks/budgets.py --model densenet121 --batch_size 16

The steps of all budgets alternate in one process. A budget covers parameters, gradients, momentum, the batch and the
step's tensors, whose peak is also measured.
"""

import statistics
import time
from collections.abc import Iterator

import torch
from methods import architecture, expand
from options import run_command

from efficient_densenet import DenseNet
from efficient_densenet.memory import BudgetPlan, tensor_peak
from efficient_densenet.memory.budget import Planner, keep
from efficient_densenet.memory.sizes import UNITS
from efficient_densenet.memory.step import MetaModel, default_loss


def compare(
    model: str = "densenet_bc_100_12", batch_size: int = 64, image_size: int = 0, budgets: int = 5, rounds: int = 9
) -> None:
    """Print a table with a line for each budget, from the smallest to one that saves all bottlenecks. In the first line
    there is no budget, and nothing is saved.

    model: a name of the zoo, or densenet_bc_<depth>_<growth rate>.
    batch_size: number of images.
    image_size: height and width of the images. Default: 32 for models for CIFAR, 224 for ImageNet.
    budgets: how many.
    rounds: steps at each budget, which alternate.
    """
    for line in _table(model, batch_size, image_size, budgets, rounds):
        print(line)


def _table(model: str, batch_size: int, image_size: int, budgets: int, rounds: int) -> Iterator[str]:
    (setting,) = expand(model, batch_size, image_size)
    torch.manual_seed(0)
    network = DenseNet(**architecture(model))
    shape = batch_size, network.in_channels, setting.image_size, setting.image_size
    planner = Planner(MetaModel(network, optimizer="sgd"), shape)
    all_saved = planner.plan(1 << 50).total
    step = (1.02 * all_saved - planner.smallest) / (budgets - 1)
    work, held = sum(each.work for each, _ in planner.order), planner.traced.total(shape, 0)
    plans = [BudgetPlan(0, planner.smallest, {}, len(planner.order), work)]
    plans += [planner.plan(round(planner.smallest + i * step)) for i in range(budgets)]
    images = torch.randn(shape)
    peaks, seconds = [], [list[float]() for _ in plans]
    for plan in plans:
        keep(network, plan)
        _step(network, images)
        peaks.append(held + tensor_peak(lambda: _step(network, images)))
    for _ in range(rounds):
        for plan, times in zip(plans, seconds, strict=True):
            keep(network, plan)
            start = time.perf_counter()
            _step(network, images)
            times.append(time.perf_counter() - start)
    yield from _lines(plans, peaks, [statistics.median(times) for times in seconds])


def _step(network: DenseNet, images: torch.Tensor) -> None:
    default_loss(network(images)).backward()


def _lines(plans: list[BudgetPlan], peaks: list[int], seconds: list[float]) -> Iterator[str]:
    yield "| budget | bottlenecks saved | measured peak | multiplications to spare | time of a step |"
    yield "| ---: | ---: | ---: | ---: | ---: |"
    for plan, peak, time_of_step in zip(plans, peaks, seconds, strict=True):
        saved = f"{sum(map(len, plan.kept.values()))} of {plan.num_layers}"
        times = f"{1000 * time_of_step:,.0f} ms ({time_of_step / seconds[0]:.3f}×)"
        budget = f"{plan.budget / UNITS['MiB']:,.1f} MiB" if plan.budget else "none"
        yield f"| {budget} | {saved} | {peak / UNITS['MiB']:,.1f} MiB | {plan.recomputed / 1e9:.1f} billion | {times} |"


if __name__ == "__main__":
    run_command(compare)
