"""Run by several processes: steps of a model by an engine and by plain, under each wrapper of training on many devices.

A case is the text "model | wrapper | detail | engine". What each process writes is "equal, by …" with the engines that
ran, or how much it differs, or where an error was raised, and which.
"""

import functools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchvision.models.densenet as torchvision_densenet
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from efficient_densenet import DenseNet, kernels, make_efficient
from efficient_densenet.engine import choose, plan
from efficient_densenet.models.layers import DenseBlock, DenseLayer, Transition
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

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


def _ours(engine: bool | str, small_inputs: bool = True) -> nn.Module:
    return DenseNet(4, (2, 2), num_init_features=6, num_classes=3, small_inputs=small_inputs, efficient=engine)


def _torchvision(engine: bool | str = False) -> nn.Module:
    return torchvision_densenet.DenseNet(4, (2, 2), num_init_features=6, bn_size=2, num_classes=3)


def _converted(engine: bool | str) -> nn.Module:
    return _convert(_torchvision(), engine)


def _convert(model: nn.Module, engine: bool | str) -> nn.Module:
    if engine:  # plain is torchvision's own
        make_efficient(model, engine)
    return model


MODELS: dict[str, Callable[[bool | str], nn.Module]] = {
    "ours": _ours,
    "ours without Numba": _ours,
    "ours with a stem": functools.partial(_ours, small_inputs=False),
    "converted": _converted,
    "converted last": _torchvision,
}
"""A model "converted last" is converted after it has been wrapped."""
SIDES = {"ours": 8, "ours without Numba": 4} | dict.fromkeys(("ours with a stem", "converted", "converted last"), 32)


def _fully_shard(model: nn.Module, unit: str, reshard: bool = True, **options: Any) -> nn.Module:
    groups = [[module] for module in model.modules() if UNITS[unit] and isinstance(module, UNITS[unit])]
    if unit == "stage":  # a block and the transition after it as one group of parameters
        groups = [[each for (each,) in groups[i : i + 2]] for i in range(0, len(groups), 2)]
    for group in groups:
        fully_shard(group if len(group) > 1 else group[0], reshard_after_forward=reshard, **options)
    return fully_shard(model, **options)


def _mixed(model: nn.Module, unit: str) -> nn.Module:
    for norm in (module for module in model.float().modules() if isinstance(module, nn.BatchNorm2d)):
        # PyTorch's batch norm on a CPU takes weights and buffers of one dtype.
        norm.running_mean, norm.running_var = norm.running_mean.bfloat16(), norm.running_var.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fully_shard(model, unit, mp_policy=policy)


def _fsdp1(model: nn.Module, unit: str, use_orig_params: bool = True) -> nn.Module:
    policy = ModuleWrapPolicy(set(UNITS[unit])) if UNITS[unit] else None
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=device)


WAYS: dict[str, dict[str, Any]] = {
    "usual": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.001},
    "accumulated": {},
    "joined": {},
}
"""Options of DistributedDataParallel. "accumulated" reduces the gradients of two batches together; "joined" has one
batch more on rank 0 than on the others."""


def _ddp(model: nn.Module, way: str) -> nn.Module:
    return DistributedDataParallel(model, **WAYS[way])


def _compiled_ddp(model: nn.Module, order: str) -> nn.Module:
    """`num_stages` of the result lists how many stages each compiled graph has."""
    num_stages: list[int] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        stage = torch.ops.efficient_densenet.stage
        num_stages.append(sum(node.target in (stage, stage.default) for node in graph.graph.nodes))
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    if order == "DDP(compile)":
        wrapped = DistributedDataParallel(torch.compile(model, backend=backend))
    else:
        wrapped = torch.compile(DistributedDataParallel(model), backend=backend)
    wrapped.num_stages = num_stages
    return wrapped


def _synchronized(model: nn.Module, images: str) -> nn.Module:
    synchronize_norms(model, None)
    return model


def _synchronized_by_torch(model: nn.Module, images: str) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


WRAPPERS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "fully_shard": _fully_shard,
    "fully_shard, not resharded": functools.partial(_fully_shard, reshard=False),
    "fully_shard, clipped": _fully_shard,
    "fully_shard, offloaded": lambda model, unit: _fully_shard(
        model, unit, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "fully_shard, mixed": _mixed,
    "FSDP1": _fsdp1,
    "FSDP1, flat": functools.partial(_fsdp1, use_orig_params=False),
    "DDP": _ddp,
    "compiled": _compiled_ddp,
    "synchronized": _synchronized,
    "synchronized by torch": _synchronized_by_torch,
}


def wrapped(name: str, wrapper: str, detail: str, engine: str, dtype: torch.dtype = torch.double) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name](ENGINES[engine]).to(dtype)
    if engine == "plain" and wrapper.startswith("synchronized"):
        return model  # the reference has the batches of all processes
    model = WRAPPERS[wrapper](model, detail)
    return _convert(model, ENGINES[engine]) if name == "converted last" else model


def _batches(name: str, wrapper: str, detail: str, engine: str) -> list[list[Tensor]]:
    """The batches of each step of this process; the plain model of synchronized norms has the batches of all."""
    rank, side, steps, count, rows = dist.get_rank(), SIDES[name], STEPS, 1, slice(None)
    generator, size = torch.Generator().manual_seed(rank), 4
    if wrapper == "DDP":
        steps, count, size = steps + (detail == "joined" and rank == 0), 1 + (detail == "accumulated"), 2 + rank
    elif wrapper.startswith("synchronized"):
        sizes = list(map(int, detail.split()))
        generator.manual_seed(3)
        size, rows = sum(sizes), slice(None) if engine == "plain" else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    shape = count, size, 3, side, side
    return [list(torch.randn(shape, dtype=torch.double, generator=generator)[:, rows]) for _ in range(steps)]


def local(tensor: Tensor | None) -> Tensor | None:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return None if tensor is None else tensor.detach().clone()


def _train(model: nn.Module, batches: list[list[Tensor]], wrapper: str, sums: bool) -> list[Tensor | None]:
    """Losses and gradients of the steps, then parameters and buffers. Raises with the place of an error in `args`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results: list[Tensor | None] = []
    dtype = next(model.parameters()).dtype
    for step, (*accumulated, last) in enumerate(batches):
        for x in accumulated:
            with model.no_sync():
                model(x).square().sum().backward()
        try:
            loss = model(last.to(dtype)).float().square().sum() if dtype != torch.double else model(last).square().sum()
        except Exception as error:
            raise StepError(f"forward {step}", error) from error
        try:
            loss.backward()
        except Exception as error:
            raise StepError(f"backward {step}", error) from error
        loss = loss.detach()
        if sums:
            for tensor in (loss, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(tensor)
        if "clipped" in wrapper:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        results += [loss, *(local(parameter.grad) for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return results + [local(tensor) for tensor in (*model.parameters(), *model.buffers())]


class StepError(Exception):
    pass


def largest_difference(actual: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The largest difference, relative to its tensor's largest value; infinite for NaN, and if one lacks a gradient."""
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        if (a is None) != (b is None) or (a is not None and a.shape != b.shape):
            return float("inf")
        if a is not None and b is not None and a.numel():
            difference = float((a - b).abs().max() / b.abs().max().clamp(min=1))
            worst = max(worst, float("inf") if math.isnan(difference) else difference)
    return worst


def _total_error(actual: list[Tensor | None], exact: list[Tensor | None]) -> float:
    pairs = [
        (a, b) for a, b in zip(actual, exact, strict=True) if b is not None and b.is_floating_point() and b.numel()
    ]
    return math.hypot(*(float((a.double() - b).norm() / b.norm().clamp(min=1e-6)) for a, b in pairs))


@contextmanager
def recorded_engines(engines: set[str]) -> Iterator[None]:
    """Add the engine of each plan that the dispatcher makes to `engines`."""
    plan_block, plan_stage = choose.plan_block, plan.plan_stage

    def recording(*args: Any) -> choose.BlockPlan:
        chosen = plan_block(*args)
        engines.add(chosen.engine.value)
        return chosen

    def recording_stages(*args: Any) -> Any:
        stage = plan_stage(*args)
        engines.update([] if stage is None else ["shared"])
        return stage

    choose.plan_block, plan.plan_stage = recording, recording_stages
    try:
        yield
    finally:
        choose.plan_block, plan.plan_stage = plan_block, plan_stage


@functools.cache
def _results(name: str, wrapper: str, detail: str, engine: str) -> tuple[list[Tensor | None], str]:
    """The tensors that training gives, and the engines that ran."""
    model, engines = wrapped(name, wrapper, detail, engine), set()
    sums = wrapper.startswith("synchronized") and engine != "plain"
    with ExitStack() as stack:
        if wrapper != "compiled":  # a compiler would look into the recording
            stack.enter_context(recorded_engines(engines))
        stack.enter_context(model.join() if detail == "joined" else nullcontext())
        results = _train(model, _batches(name, wrapper, detail, engine), wrapper, sums)
    stages = getattr(model, "num_stages", [])
    by = f"{max(stages)} stages in one graph" if any(stages) else ", ".join(sorted(engines))
    return results, by or "the author's forward"


def outcome(case: str) -> str:
    name, wrapper, detail, engine = case.split(" | ")
    expected, _ = _results(name, wrapper, detail, "plain")
    numba_supports = kernels.numba_supports
    if name == "ours without Numba":
        kernels.numba_supports = lambda values: False
    try:
        actual, by = _results(name, wrapper, detail, engine)
    except StepError as refused:
        place, error = refused.args
        return f"{place}: {type(error).__name__}: {error}"
    finally:
        kernels.numba_supports = numba_supports
    if wrapper.endswith("mixed"):
        exact, _ = _results(name, "fully_shard", detail, "plain")
        errors = [_total_error(each, exact) for each in (actual, expected)]
        return f"equal, by {by}" if errors[0] <= 2 * errors[1] else f"errors {errors}, by {by}"
    difference = largest_difference(actual, expected)
    return f"equal, by {by}" if difference <= TOLERANCE else f"differs by {difference:.1e}, by {by}"


@contextmanager
def process_group(store: str) -> Iterator[int]:
    """A group of the processes that `forks.fork_processes` has started, which meet in the new file `store`.

    Yields the rank. Warnings are ignored inside.
    """
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    file = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield rank
    dist.destroy_process_group()


def save() -> None:
    """Save a sharded model and its optimizer after two steps, and all that must be loaded again."""
    model = wrapped("ours", "fully_shard", "block", "shared")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for (x,) in _batches("ours", "fully_shard", "block", "shared")[:2]:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id="saved")
    torch.save([full(tensor) for tensor in (*model.parameters(), *model.buffers())], f"saved.{dist.get_rank()}.pt")


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def loads(folder: Path) -> bool:
    """Whether another engine and number of processes load what two processes have saved, bit for bit."""
    model = wrapped("ours", "fully_shard", "block", "plain")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder / "saved")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    saved = [torch.load(folder / f"saved.{rank}.pt", weights_only=True) for rank in range(2)]
    # Parameters are equal in both; running statistics differ, and the checkpoint has those of one of them.
    loaded = zip([full(tensor) for tensor in (*model.parameters(), *model.buffers())], *saved, strict=True)
    equal = all(any(torch.equal(tensor, each) for each in of_ranks) for tensor, *of_ranks in loaded)
    return equal and {int(state["step"]) for state in optimizer.state.values()} == {2}


def main(cases: str, path: str) -> None:
    outcomes = {}
    for i, case in enumerate(json.loads(Path(cases).read_text())):
        with process_group(f"{path}.store{i}") as rank:  # a group for each case: an error may leave one in pieces
            outcomes[case] = save() if case == "save" else outcome(case)
    Path(f"{path}.{rank}").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
