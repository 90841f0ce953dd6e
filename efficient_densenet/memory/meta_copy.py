"""A copy of a model on the meta device, whose tensors have sizes but no data."""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch_private import hook_dicts, is_distributed_wrapper, sharding_of


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy that allocates no data and calls none of the modules' hooks, in training mode if no module is.

    Its modules have the forwards of their classes: one that was set on a module may belong to the original.
    """
    model = unwrapped(model)
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, tensors)):
        raise ValueError("found parameters without a size: run the model once on an input, then ask for its memory")
    if any(sharding_of(module) for module in model.modules()):
        raise ValueError(
            "found parameters that are sharded among processes: ask for the model's memory before it is sharded"
        )
    memo: dict[int, Any] = {id(tensor): _to_meta(tensor) for tensor in [*tensors, *_other_tensors(model)]}
    for module in model.modules():
        for hooks in hook_dicts(module):
            memo[id(hooks)] = OrderedDict.fromkeys(hooks, _no_hook)
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        forward = vars(module).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not module:
            del module.forward
    return copied if any(module.training for module in copied.modules()) else copied.train()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside PyTorch's wrappers for compilation and data parallelism."""
    while hasattr(model, "_orig_mod") or (is_distributed_wrapper(model) and hasattr(model, "module")):
        inside: Any = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        model = inside
    return model


def _other_tensors(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that modules have as ordinary attributes."""
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _to_meta(tensor: Tensor) -> Tensor:
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _no_hook(*arguments: Any, **keywords: Any) -> None:
    """A function that takes the place of a hook."""
