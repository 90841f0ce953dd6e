"""Run by several processes: steps under DistributedDataParallel by the default engine, and by plain in the same way.

A case is the text "model | way". What is written for each is "equal, by …" with the engines that ran, or how much it
differs.
"""

import contextlib
import functools
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from sharded_steps import MODELS, TOLERANCE, largest_difference, recorded_engines, write_outcomes
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
SIDES = {"ours": 8, "converted": 32}


def _compressed(model: nn.Module, hook: Callable) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    return wrapped


WAYS: dict[str, Callable[[nn.Module], DistributedDataParallel]] = {
    "usual": DistributedDataParallel,
    "static graph": functools.partial(DistributedDataParallel, static_graph=True),
    "unused parameters": functools.partial(DistributedDataParallel, find_unused_parameters=True),
    "bucket views": functools.partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "small buckets": functools.partial(DistributedDataParallel, bucket_cap_mb=0.001),
    "accumulated": DistributedDataParallel,
    "joined": DistributedDataParallel,
    "float16": functools.partial(_compressed, hook=default_hooks.fp16_compress_hook),
    "bfloat16": functools.partial(_compressed, hook=default_hooks.bf16_compress_hook),
}
"""How gradients are reduced. "accumulated" reduces those of two batches together; "joined" has one batch more on rank 0
than on the others."""


def _batches(name: str, way: str) -> list[list[Tensor]]:
    """The batches of each step of this process."""
    rank, side = dist.get_rank(), SIDES[name]
    generator = torch.Generator().manual_seed(rank)
    steps = STEPS + (way == "joined" and rank == 0)
    shape = (2 if way == "accumulated" else 1), 2 + rank, 3, side, side
    return [list(torch.randn(shape, dtype=torch.double, generator=generator)) for _ in range(steps)]


def _train(name: str, way: str, engine: bool | str) -> list[Tensor | None]:
    """Losses and gradients of the steps, then parameters and buffers."""
    torch.manual_seed(0)
    model = WAYS[way](MODELS[name](engine).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results: list[Tensor | None] = []
    with model.join() if way == "joined" else contextlib.nullcontext():
        for *accumulated, last in _batches(name, way):
            for x in accumulated:
                with model.no_sync():
                    model(x).square().sum().backward()
            loss = model(last).square().sum()
            loss.backward()
            results += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    return results + [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def outcome(case: str) -> str:
    name, way = case.split(" | ")
    engines: set[str] = set()
    expected = _train(name, way, False)
    with recorded_engines(engines):
        actual = _train(name, way, True)
    difference = largest_difference(actual, expected)
    # A gradient that lies between two numbers of half precision is rounded to either.
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2}.get(way, TOLERANCE)
    verdict = "equal" if difference <= tolerance else f"differs by {difference:.1e}"
    return f"{verdict}, by {', '.join(sorted(engines))}"


if __name__ == "__main__":
    write_outcomes(outcome, *sys.argv[1:])
