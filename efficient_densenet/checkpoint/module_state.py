"""The state of a module on which its forward depends: saved in the forward, restored for the recomputation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch_private import hook_dicts, is_distributed_wrapper, is_managed_by_fsdp, without_dispatch_modes
from ..norms.batch_norm import UpdatesOnce
from .parameters import function_name


class _Snapshot(NamedTuple):
    """The state of a module that a recomputation restores. `hooks` are as in `hook_dicts`, or empty without hooks."""

    training: bool
    attributes: dict[str, Any]
    requires_grad: dict[str, bool]
    hooks: list[dict[int, Any]]


class ModuleState:
    """The state of a module at a forward, which a recomputation repeats on copies of the buffers.

    Parameters that FSDP manages are left alone: it replaces them by gathered ones of equal values.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_sharded = is_managed_by_fsdp(module)
        self.is_managed = self.is_sharded or is_distributed_wrapper(module)
        self.at_forward = self.snapshot()
        self.parameters: dict[str, Any] = {}
        self.buffers = {name: _copied(name, buffer) for name, buffer in self._current_buffers().items()}

    def snapshot(self) -> _Snapshot:
        """The present state, but for the buffers."""
        module, parameters = self.module, {} if self.is_sharded else self.module._parameters
        requires_grad = {name: p.requires_grad for name, p in parameters.items() if p is not None}
        hooks = [dict(hooks) for hooks in hook_dicts(module)] if _has_hooks(module) else []
        return _Snapshot(module.training, self._attributes(), requires_grad, hooks)

    def _attributes(self) -> dict[str, Any]:
        """The attributes that are numbers, flags, strings or functions, and none of a managed module."""
        if self.is_managed:
            return {}
        return {name: value for name, value in self.module.__dict__.items() if type(value) in _ATTRIBUTE_TYPES}

    def restore(self, snapshot: _Snapshot) -> None:
        """Restore a state, but for the parameters themselves."""
        module = self.module
        vars(module).update(snapshot.attributes)
        if module.training is not snapshot.training:
            module.training = snapshot.training
        if snapshot.hooks or _has_hooks(module):
            for i, hooks in enumerate(hook_dicts(module)):
                saved = snapshot.hooks[i] if snapshot.hooks else {}
                if hooks != saved:
                    hooks.clear()
                    hooks.update(saved)
        for name, required in snapshot.requires_grad.items():
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.requires_grad is not required:
                parameter.requires_grad_(required)

    def has_hooks(self) -> bool:
        """Return True if the module had forward hooks, or has parametrizations."""
        return bool(self.at_forward.hooks) or "parametrizations" in self.module._modules

    def update_after_forward(self) -> None:
        """Save the parameters, and attributes that the forward has set, such as a flag that says "initialized".

        A number keeps the value from before the forward: it may be a counter, and the recomputation counts again.
        """
        before, attributes = self.at_forward.attributes, self._attributes()
        if attributes != before:
            numbers = {name: value for name, value in before.items() if type(value) in (int, float)}
            self.at_forward = self.at_forward._replace(attributes=attributes | numbers)
        self.parameters = {} if self.is_sharded else self.module._parameters.copy()

    def check_parameters(self, function: Callable) -> None:
        """Raise RuntimeError if parameters have been replaced since the forward of `function`."""
        current = self.module._parameters
        if any(current.get(each) is not parameter for each, parameter in self.parameters.items()):
            raise RuntimeError(
                f"{function_name(function)} is recomputed with other parameters than in the forward: those of a "
                f"{type(self.module).__name__} have been replaced since then, as torch.func.functional_call does when "
                "it returns; run the backward before that, or do not checkpoint"
            )

    def lend_buffers(self) -> None:
        """Give the module copies of its buffers, with the values of the forward, which the recomputation may change.

        A boolean or integer buffer, such as a flag, is copied with its current values, a batch norm's counter with that
        of the forward.
        """
        for name in self.buffers.keys() & self._current_buffers().keys() if self.buffers else ():
            original, version, values = self.buffers[name]
            if values is None and original.is_floating_point() and original._version != version:
                raise RuntimeError(
                    f"buffer {name} of a {type(self.module).__name__}, of shape {tuple(original.shape)}, has been "
                    "changed in place since the forward, so that a recomputation would use other values: do not "
                    "checkpoint it"
                )
            self.module._buffers[name] = (original if values is None else values).clone()

    def _current_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a recomputation may read or change. A training `UpdatesOnce` does neither, unless its
        author's forward reads its statistics."""
        module = self.module
        buffers = module._buffers
        if not buffers or self.is_managed:
            return {}
        if isinstance(module, UpdatesOnce) and module.training and not (_has_hooks(module) or _has_own_forward(module)):
            return {}
        return {name: b for name, b in buffers.items() if b is not None and not (b.requires_grad or b.is_inference())}


@contextmanager
def modules_restored(states: Sequence[ModuleState]) -> Iterator[None]:
    """Restore the state of each module in this context."""
    before = [state.snapshot() for state in states]
    buffers = [(state.module, state.module._buffers.copy()) for state in states if state.buffers]
    try:
        with without_dispatch_modes():  # selective checkpointing counts the operations of the function
            for state in states:
                state.restore(state.at_forward)
                state.lend_buffers()
        yield
    finally:
        for state, snapshot in zip(states, before, strict=True):
            state.restore(snapshot)
        for module, originals in buffers:
            module._buffers.update(originals)


_ATTRIBUTE_TYPES = {bool, int, float, complex, str, NoneType, FunctionType, BuiltinFunctionType, torch.dtype}


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _has_own_forward(module: nn.Module) -> bool:
    """Return True if a class that is neither PyTorch's nor ours defines the module's forward."""
    classes = (cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return not all(cls.__module__.startswith(("torch.", "efficient_densenet.")) for cls in classes)


def _copied(name: str, buffer: Tensor) -> tuple[Tensor, int, Tensor | None]:
    """Return a buffer, its version, and a copy of its values if the buffer is small, and floating-point or a counter of
    batches."""
    has_values_of_forward = buffer.is_floating_point() or name == "num_batches_tracked"
    is_copied = has_values_of_forward and buffer.numel() <= _MAX_COPIED_ELEMENTS
    return buffer, buffer._version, buffer.clone() if is_copied else None


_MAX_COPIED_ELEMENTS = 1 << 16
