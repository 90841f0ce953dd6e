"""A copy of a model on the meta device, whose tensors have sizes but no data."""

import copy
from collections import OrderedDict
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
    # Modules may have tensors as ordinary attributes too.
    tensors += [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    memo = dict[int, Any]()
    for tensor in tensors:
        data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
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


def _no_hook(*arguments: Any, **keywords: Any) -> None:
    """A function that takes the place of a hook."""
