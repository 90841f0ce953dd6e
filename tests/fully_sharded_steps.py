"""Run by several processes: models under `fully_shard` with its options, their checkpoints, and their memory.

`main` runs the functions that the cases name, and writes what they return.
"""

import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_steps import largest_difference, process_group, recorded_engines
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from efficient_densenet import DenseNet
from efficient_densenet.models.layers import DenseBlock


def _model(engine: bool | str, dtype: torch.dtype = torch.double) -> DenseNet:
    torch.manual_seed(0)
    return DenseNet(4, (3, 2), num_init_features=6, num_classes=3, efficient=engine).to(dtype)


def _sharded(model: DenseNet, mesh: DeviceMesh | None = None, **options) -> DenseNet:
    """`model` with its blocks sharded, and what is left with the root."""
    for module in model.modules():
        if isinstance(module, DenseBlock):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _batch(step: int, rank: int | None = None) -> Tensor:
    """The images of a process, or of another one of `rank`."""
    generator = torch.Generator().manual_seed(10 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(4, 3, 8, 8, dtype=torch.double, generator=generator)


def _train(
    model: DenseNet,
    optimizer: torch.optim.Optimizer,
    steps: range,
    max_norm: float | None = None,
    batches: Callable[[int], Tensor] = _batch,
) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        model(batches(step).to(dtype)).float().square().sum().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def _full(model: DenseNet) -> list[Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in (*model.parameters(), *model.buffers())]


def _trained(engine: bool | str, mesh: DeviceMesh | None = None, dtype=torch.double, max_norm=None, **options) -> list:
    model = _model(engine, dtype)
    if "mp_policy" in options:  # PyTorch's batch norm on a CPU takes weights and buffers of one dtype
        for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.running_mean, norm.running_var = norm.running_mean.bfloat16(), norm.running_var.bfloat16()
    model = _sharded(model, mesh, **options)
    _train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), range(3), max_norm)
    return _full(model)


def clipped() -> dict:
    engines: set[str] = set()
    with recorded_engines(engines):
        actual = _trained("shared", max_norm=0.5)
    return {"difference": largest_difference(actual, _trained(False, max_norm=0.5)), "engines": sorted(engines)}


def hybrid() -> dict:
    """A mesh of two groups of two: parameters are sharded inside a group, and replicated between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {"difference": largest_difference(_trained("shared", mesh), _trained(False, mesh))}


def offloaded() -> dict:
    """Parameters, gradients and the optimizer's state on the CPU; there is no other device to copy them to here."""
    actual = _trained("shared", offload_policy=CPUOffloadPolicy(pin_memory=False))
    return {"difference": largest_difference(actual, _trained(False))}


def tensor_parallel() -> dict:
    """The classifier's rows or columns in several processes, each of which has the whole batch, alone and under
    `fully_shard` over another dimension of the mesh."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    differences = {}
    for style in (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())):
        trained = []
        for engine in ("shared", False):
            model = _model(engine)
            if engine:
                parallelize_module(model, mesh["tensor"], {"classifier": style})
            if size > 2:
                model = _sharded(model, mesh["data"])
            batches = functools.partial(_batch, rank=mesh["data"].get_local_rank())
            _train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), range(3), batches=batches)
            trained.append(_full(model))
        differences[type(style).__name__] = largest_difference(*trained)
    return differences


def mixed() -> dict:
    """The errors of plain and of the shared engine beside float64."""
    exact = _trained(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = {}
    for engine in ("plain", "shared"):
        engines: set[str] = set()
        with recorded_engines(engines):
            trained = _trained(engine, dtype=torch.float, mp_policy=policy)
        pairs = [(a.double(), b) for a, b in zip(trained, exact, strict=True) if b.is_floating_point()]
        errors = [float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in pairs]
        results[engine] = {"error": math.hypot(*errors), "engines": sorted(engines)}
    return results


def save() -> None:
    model = _sharded(_model("shared"))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    _train(model, optimizer, range(2))
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id="saved")
    torch.save(_full(model), f"saved.{dist.get_rank()}.pt")


def load() -> dict:
    model = _sharded(_model("plain"))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id="saved")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    saved = [torch.load(f"saved.{rank}.pt", weights_only=True) for rank in range(2)]
    # Parameters are equal in both; running statistics differ, and the checkpoint has those of one of them.
    loaded = zip(_full(model), *saved, strict=True)
    equal = [any(torch.equal(tensor, each) for each in of_ranks) for tensor, *of_ranks in loaded]
    steps = {int(state["step"]) for state in optimizer.state.values()}
    return {"equal": all(equal), "steps": sorted(steps)}


def main(case: str, path: str) -> None:
    with process_group(f"{path}.store") as rank:
        result = globals()[case]()
    Path(f"{path}.{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
