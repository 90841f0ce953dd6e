"""`checkpoint_wrapper`: a module whose every call is recomputed, and which is otherwise what it was."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from .._mixins import add_mixin, remove_mixin
from ..norms.batch_norm import undo_update_once, update_once
from .call import run_twice
from .hooks import fire_always

Module = TypeVar("Module", bound=nn.Module)


class Recomputed:
    """Mixin: the forward of the class behind it, checkpointed; hooks on the module itself stay outside."""

    _offload_to_cpu = False
    _norms_made_to_update_once: Sequence[str] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return run_twice(super().forward, args, kwargs, offload=self._offload_to_cpu)


def checkpoint_wrapper(module: Module, offload_to_cpu: bool = False) -> Module:
    """Recompute every later call of `module` in its backward, and return `module`.

    It stays the same object with the same parameters, names, hooks and attributes; only its class, and that of the
    batch norms inside, becomes a subclass of what it was. With `offload_to_cpu` its inputs wait in CPU memory.
    """
    if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"found a {type(module).__name__} whose forward is compiled or was set on the instance, which would hide "
            "the recomputation: wrap a module whose forward is its class's, or call checkpoint(module, ...)"
        )
    if not isinstance(module, Recomputed):
        module._norms_made_to_update_once = [name for name, m in module.named_modules() if update_once(m)]
        add_mixin(module, Recomputed)
    module._offload_to_cpu = offload_to_cpu
    return module


def unwrap(module: Module) -> Module:
    """Undo `checkpoint_wrapper`, and return `module`."""
    if isinstance(module, Recomputed):
        remove_mixin(module, Recomputed)
        for name, inside in module.named_modules():
            fire_always(inside)
            if name in module._norms_made_to_update_once:
                undo_update_once(inside)
        for name in ("_offload_to_cpu", "_norms_made_to_update_once"):
            vars(module).pop(name, None)
    return module
