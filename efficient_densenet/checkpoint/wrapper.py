"""`checkpoint_wrapper`: checkpoint every call of a module, which stays the same object."""

from typing import Any, TypeVar

import torch
from torch import nn

from .._checks import check_module
from .._mixins import ModuleMixin, add_mixin, remove_mixin
from ..norms.batch_norm import undo_update_once, update_once
from .call import ContextFn, checkpoint_call

Module = TypeVar("Module", bound=nn.Module)


class CheckpointedForward(ModuleMixin):
    """Mixin that checkpoints the forward of a module. Hooks on the module itself are not part of the checkpoint."""

    _checkpoint_options: dict[str, Any]
    _converted_norms: list[str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint_call(super().forward, args, kwargs, **self._checkpoint_options)


def checkpoint_wrapper(module: Module, offload_to_cpu: bool = False, context_fn: ContextFn | None = None) -> Module:
    """Checkpoint every later call of `module`, and return `module`.

    The module stays the same object, with the same parameters, names, hooks and attributes. Only its class, and the
    class of each batch norm inside, is replaced by a subclass. If `offload_to_cpu` is True, the inputs of the module
    are saved in CPU memory until the backward. `context_fn` is as in `checkpoint`.
    """
    check_module("checkpoint_wrapper", module)
    if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"found a {type(module).__name__} whose forward is compiled or was set on the instance, which would "
            "bypass the checkpoint: wrap a module whose class defines forward, or call checkpoint(module, ...)"
        )
    wrapped: Any = module
    if not isinstance(module, CheckpointedForward):
        wrapped._converted_norms = [name for name, m in module.named_modules() if update_once(m)]
        add_mixin(module, CheckpointedForward)
    wrapped._checkpoint_options = {"offload": offload_to_cpu} | ({"context_fn": context_fn} if context_fn else {})
    return module


def unwrap(module: Module) -> Module:
    """Undo `checkpoint_wrapper`, and return `module`."""
    if isinstance(module, CheckpointedForward):
        converted_norms = module._converted_norms
        remove_mixin(module, CheckpointedForward)
        for name, submodule in module.named_modules():
            if name in converted_norms:
                undo_update_once(submodule)
        del module._checkpoint_options, module._converted_norms
    return module
