"""What the forward of a module depends on besides its inputs, restored for the recomputation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from .._torch_private import hook_dicts, is_distributed_wrapper, is_managed_by_fsdp


class ModuleState:
    """The training mode, attributes, forward hooks and parameters of a module, and which of them require a gradient."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.training = module, module.training
        self.parameter_ids = _parameter_ids(module)
        self.requires_grad = _requires_grad(module)
        self.attributes = _attributes(module)
        # A lazy module's own hook initializes it and is removed, never to be called again.
        self.hooks = None if isinstance(module, LazyModuleMixin) else [dict(hooks) for hooks in hook_dicts(module)]

    def has_other_parameters(self) -> bool:
        """Return True if parameters have been replaced. FSDP replaces them by gathered ones, with the same values."""
        return _parameter_ids(self.module) != self.parameter_ids and not is_managed_by_fsdp(self.module)

    def update_after_forward(self) -> None:
        """Note what the forward itself has set, such as that it has initialized something. A number that it changes is
        taken for a counter, with which the recomputation starts where the forward did."""
        attributes = _attributes(self.module)
        if attributes != self.attributes:
            numbers = {name: value for name, value in self.attributes.items() if type(value) in (int, float)}
            self.attributes = attributes | numbers

    def restore(self) -> None:
        """Restore this state."""
        module = self.module
        if _attributes(module) != self.attributes:
            vars(module).update(self.attributes)
        if module.training is not self.training:
            module.training = self.training
        if self.hooks is not None and hook_dicts(module) != self.hooks:
            for hooks, saved in zip(hook_dicts(module), self.hooks, strict=True):
                hooks.clear()
                hooks.update(saved)
        if _requires_grad(module) != self.requires_grad and not is_managed_by_fsdp(module):
            for name, required in self.requires_grad.items():
                module._parameters[name].requires_grad_(required)  # pyright: ignore[reportOptionalMemberAccess]


@contextmanager
def modules_restored(states: Sequence[ModuleState]) -> Iterator[None]:
    """Restore the state of each module in this context."""
    before = [ModuleState(state.module) for state in states]
    try:
        for state in states:
            state.restore()
        yield
    finally:
        for state in before:
            state.restore()


_VALUES = {bool, int, float, complex, str, NoneType, FunctionType, BuiltinFunctionType, torch.dtype}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that are numbers, flags, names or functions. What runs a sharded module sets its own."""
    if is_managed_by_fsdp(module) or isinstance(module, LazyModuleMixin) or is_distributed_wrapper(module):
        return {}
    return {name: value for name, value in vars(module).items() if type(value) in _VALUES}


def _parameter_ids(module: nn.Module) -> dict[str, int]:
    return {name: id(parameter) for name, parameter in module._parameters.items()}


def _requires_grad(module: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in module._parameters.items() if p is not None}
