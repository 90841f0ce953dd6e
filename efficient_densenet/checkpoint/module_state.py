"""The state of a module on which its forward depends: saved in the forward, restored for the recomputation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .._torch_private import hook_dicts, is_distributed_wrapper, is_managed_by_fsdp
from ..norms.batch_norm import UpdatesOnce


class ModuleState:
    """The training mode, attributes, forward hooks and parameters of a module, and which of them require a gradient."""

    def __init__(self, module: nn.Module, with_buffers: bool = True) -> None:
        self.module, self.training = module, module.training
        self.parameter_ids = _parameter_ids(module)
        self.requires_grad = _requires_grad(module)
        self.attributes = _attributes(module)
        self.buffers = {name: _copied(buffer) for name, buffer in _buffers(module).items()} if with_buffers else {}
        # A lazy module removes its own hook after initialization, and the hook must not be restored.
        self.hooks = None if isinstance(module, LazyModuleMixin) else [dict(hooks) for hooks in hook_dicts(module)]

    def has_hooks(self) -> bool:
        """Return True if the module has forward hooks or parametrizations."""
        return any(self.hooks or ()) or "parametrizations" in self.module._modules

    def has_other_parameters(self) -> bool:
        """Return True if parameters have been replaced, except by FSDP, whose gathered parameters have equal values."""
        return _parameter_ids(self.module) != self.parameter_ids and not is_managed_by_fsdp(self.module)

    def update_after_forward(self) -> None:
        """Save the attributes that the forward has set, such as a flag that says it has initialized something.

        A number keeps the value from before the forward: it may be a counter, and the recomputation counts again.
        """
        attributes = _attributes(self.module)
        if attributes != self.attributes:
            numbers = {name: value for name, value in self.attributes.items() if type(value) in (int, float)}
            self.attributes = attributes | numbers

    def lend_buffers(self) -> None:
        """Give the module copies of its buffers, with the values of the forward, which the recomputation may change.

        A boolean or integer buffer, such as a flag or a counter, is copied with its current values.
        """
        for name in self.buffers.keys() & _buffers(self.module).keys() if self.buffers else ():
            original, version, values = self.buffers[name]
            if values is None and original.is_floating_point() and original._version != version:
                raise RuntimeError(
                    f"buffer {name} of a {type(self.module).__name__}, of shape {tuple(original.shape)}, has been "
                    "changed in place since the forward, so that a recomputation would use other values: do not "
                    "checkpoint it"
                )
            self.module._buffers[name] = (original if values is None else values).clone()

    def restore(self) -> None:
        """Restore this state, without the buffers."""
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
    before = [ModuleState(state.module, with_buffers=False) for state in states]
    buffers = [(state.module, state.module._buffers.copy()) for state in states if state.buffers]
    try:
        for state in states:
            state.restore()
            state.lend_buffers()
        yield
    finally:
        for state in before:
            state.restore()
        for module, originals in buffers:
            module._buffers.update(originals)


_ATTRIBUTE_TYPES = {bool, int, float, complex, str, NoneType, FunctionType, BuiltinFunctionType, torch.dtype}


def _is_managed(module: nn.Module) -> bool:
    """Return True for a lazy module, and for one whose attributes and buffers FSDP or DDP manages."""
    return is_managed_by_fsdp(module) or isinstance(module, LazyModuleMixin) or is_distributed_wrapper(module)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that are numbers, flags, strings or functions, and none of a managed module."""
    if _is_managed(module):
        return {}
    return {name: value for name, value in vars(module).items() if type(value) in _ATTRIBUTE_TYPES}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a recomputation may read or change. A training `UpdatesOnce` does neither."""
    buffers = module._buffers
    if not buffers or _is_managed(module):
        return {}
    if isinstance(module, UpdatesOnce) and module.training and not (module._forward_hooks or module._forward_pre_hooks):
        return {}
    return {name: b for name, b in buffers.items() if b is not None and not (b.requires_grad or b.is_inference())}


def _copied(buffer: Tensor) -> tuple[Tensor, int, Tensor | None]:
    """Return a buffer, its version, and a copy of its values if the buffer is small and floating-point."""
    is_copied = buffer.is_floating_point() and buffer.numel() <= _MAX_COPIED_ELEMENTS
    return buffer, buffer._version, buffer.clone() if is_copied else None


_MAX_COPIED_ELEMENTS = 1 << 16


def _parameter_ids(module: nn.Module) -> dict[str, int]:
    return {name: id(parameter) for name, parameter in module._parameters.items()}


def _requires_grad(module: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in module._parameters.items() if p is not None}
