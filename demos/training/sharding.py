"""Parameters sharded over processes by `fully_shard`, and full state dicts of them.

`torch.distributed.checkpoint.state_dict` gathers too, but its `get_optimizer_state_dict` and `set_optimizer_state_dict`
take a step with zero gradients and a learning rate of 0 where an optimizer has no state yet. Of SGD with weight decay
that leaves momentum.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

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


def gather_state(state: Mapping[Any, Any]) -> Any:
    """A state dict with full tensors on the CPU in the place of sharded ones.

    Where there are any, all processes must call this together; those but the main one get empty tensors.
    """
    return _map_tensors(state, lambda _, tensor: _gather(tensor))


def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a full state dict, which every process must have."""
    own = model.state_dict()
    model.load_state_dict(_map_tensors(state, lambda keys, tensor: _shard_like(tensor, own[keys[0]])))


def shard_optimizer_state(state: Mapping[int, Any], parameters: list[nn.Parameter]) -> Any:
    """The full states of `parameters` by their numbers, sharded as the parameters are."""
    return _map_tensors(state, lambda keys, tensor: _shard_like(tensor, parameters[keys[0]]))


def _gather(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    return full.cpu() if dist.get_rank() == 0 else torch.empty(0)


def _shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device, like.dtype), like.device_mesh, like.placements)


def _map_tensors(state: Any, function: Callable[[tuple, Tensor], Tensor], keys: tuple = ()) -> Any:
    """A copy of nested dicts with other tensors. A dict keeps its class and attributes, such as `_metadata`."""
    if isinstance(state, Tensor):
        return function(keys, state)
    if not isinstance(state, dict):
        return state
    copied = copy.copy(state)
    copied.update({key: _map_tensors(value, function, (*keys, key)) for key, value in state.items()})
    return copied
