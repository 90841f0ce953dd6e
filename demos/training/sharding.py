"""Parameters sharded over processes by `fully_shard`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from efficient_densenet.models.densenet import DenseNet
from efficient_densenet.models.layers import DenseBlock, Transition


def stages(model: DenseNet) -> list[list[nn.Module]]:
    """The dense blocks, each with the transition after it, which the shared engine runs together."""
    found: list[list[nn.Module]] = []
    for module in model.features.children():
        if isinstance(module, DenseBlock):
            found.append([module])
        elif isinstance(module, Transition):
            found[-1].append(module)
    return found


def shard_parameters(model: DenseNet, device: torch.device) -> None:
    """Shard each stage of `model` over all processes, and then what is left. The main process's values are kept."""
    for tensor in (*model.parameters(), *model.buffers()):  # as DistributedDataParallel does
        dist.broadcast(tensor.detach(), 0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for stage in stages(model):
        fully_shard(stage if len(stage) > 1 else stage[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)
