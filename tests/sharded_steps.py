"""Run by several processes: three steps of sharded models by every engine, and by plain under the same sharding.

A case is the text "model | sharding | unit | engine". What is written for each is "equal, by …" with the engines that
ran, or how much it differs, or where an error was raised, and which.
"""

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision.models.densenet as torchvision_densenet
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from efficient_densenet import DenseNet, make_efficient
from efficient_densenet.engine import choose
from efficient_densenet.models.layers import DenseBlock, DenseLayer, Transition

STEPS, TOLERANCE = 3, 1e-10
ENGINES = {"plain": False, "official": "official", "checkpoint": "checkpoint", "shared": "shared", "best": True}
UNITS: dict[str, tuple[type, ...]] = {
    "root": (),
    "stage": (DenseBlock, Transition, torchvision_densenet._DenseBlock, torchvision_densenet._Transition),
    "block": (DenseBlock, torchvision_densenet._DenseBlock),
    "layer": (DenseLayer, torchvision_densenet._DenseLayer),
    "norm": (nn.BatchNorm2d,),
    "convolution": (nn.Conv2d,),
}


def _ours(engine: bool | str) -> nn.Module:
    return DenseNet(4, (2, 2), num_init_features=6, num_classes=3, efficient=engine)


def _torchvision() -> nn.Module:
    return torchvision_densenet.DenseNet(4, (2, 2), num_init_features=6, bn_size=2, num_classes=3)


def _converted(engine: bool | str) -> nn.Module:
    return _convert(_torchvision(), engine)


def _convert(model: nn.Module, engine: bool | str) -> nn.Module:
    if engine:  # plain is torchvision's own
        make_efficient(model, engine)
    return model


MODELS = {"ours": _ours, "converted": _converted, "converted last": _converted}
"""A model "converted last" is converted after it has been sharded."""


def _fully_shard(model: nn.Module, unit: str, reshard: bool = True) -> nn.Module:
    groups = [[module] for module in model.modules() if UNITS[unit] and isinstance(module, UNITS[unit])]
    if unit == "stage":  # a block and the transition after it as one group of parameters
        groups = [[each for (each,) in groups[i : i + 2]] for i in range(0, len(groups), 2)]
    for group in groups:
        fully_shard(group if len(group) > 1 else group[0], reshard_after_forward=reshard)
    return fully_shard(model)


def _fsdp1(model: nn.Module, unit: str, use_orig_params: bool) -> nn.Module:
    policy = ModuleWrapPolicy(set(UNITS[unit])) if UNITS[unit] else None
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=device)


SHARDINGS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "fully_shard": _fully_shard,
    "fully_shard, not resharded": functools.partial(_fully_shard, reshard=False),
    "FSDP1": functools.partial(_fsdp1, use_orig_params=True),
    "FSDP1, flat": functools.partial(_fsdp1, use_orig_params=False),
}


def _model(name: str, sharding: str, unit: str, engine: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "converted last":
        return _convert(SHARDINGS[sharding](_torchvision().double(), unit), ENGINES[engine])
    return SHARDINGS[sharding](MODELS[name](ENGINES[engine]).double(), unit)


def _local(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _train(model: nn.Module, side: int) -> list[Tensor | None]:
    """Losses and gradients of the steps, then parameters and buffers. Raises with the place of an error in `args`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results: list[Tensor | None] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 3, side, side, dtype=torch.double, generator=generator)
        try:
            loss = model(x).square().sum()
        except Exception as error:
            raise StepError(f"forward {step}", error) from error
        try:
            loss.backward()
        except Exception as error:
            raise StepError(f"backward {step}", error) from error
        results += [loss.detach(), *(_local(parameter.grad) for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return results + [_local(tensor) for tensor in (*model.parameters(), *model.buffers())]


class StepError(Exception):
    pass


def largest_difference(actual: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The largest one, relative to the largest value of its tensor; infinite where only one has a gradient."""
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        if (a is None) != (b is None) or (a is not None and a.shape != b.shape):
            return float("inf")
        if a is not None and b is not None and a.numel():
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1)))
    return worst


@functools.cache
def _expected(name: str, sharding: str, unit: str) -> list[Tensor | None]:
    return _train(_model(name, sharding, unit, "plain"), _side(name))


@contextmanager
def recorded_engines(engines: set[str]) -> Iterator[None]:
    """Add the engine of each plan that the dispatcher makes to `engines`."""
    plan_block = choose.plan_block

    def recording(*args: Any) -> choose.BlockPlan:
        plan = plan_block(*args)
        engines.add(plan.engine.value)
        return plan

    choose.plan_block = recording
    try:
        yield
    finally:
        choose.plan_block = plan_block


def _side(name: str) -> int:
    return 8 if name == "ours" else 32


def outcome(case: str) -> str:
    name, sharding, unit, engine = case.split(" | ")
    expected = _expected(name, sharding, unit)
    engines: set[str] = set()
    try:
        with recorded_engines(engines):
            actual = _train(_model(name, sharding, unit, engine), _side(name))
    except StepError as refused:
        place, error = refused.args
        return f"{place}: {type(error).__name__}: {error}"
    difference = largest_difference(actual, expected)
    engines = ", ".join(sorted(engines)) or "the author's forward"
    return f"equal, by {engines}" if difference <= TOLERANCE else f"differs by {difference:.1e}, by {engines}"


@contextmanager
def process_group(store: str) -> Iterator[int]:
    """A group of the processes that `forks.fork_processes` has started, which meet in the new file `store`.

    Yields the rank. Warnings are ignored inside.
    """
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    file = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield rank
    dist.destroy_process_group()


def write_outcomes(outcome: Callable[[str], str], cases: str, path: str) -> None:
    """Write the outcomes of the cases in the file `cases`, all in one process group."""
    with process_group(f"{path}.store") as rank:
        outcomes = {case: outcome(case) for case in json.loads(Path(cases).read_text())}
    Path(f"{path}.{rank}").write_text(json.dumps(outcomes))


def main(cases: str, path: str) -> None:
    outcomes = {}
    for i, case in enumerate(json.loads(Path(cases).read_text())):
        with process_group(f"{path}.store{i}") as rank:  # a group for each case: an error may leave one in pieces
            outcomes[case] = outcome(case)
    Path(f"{path}.{rank}").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
