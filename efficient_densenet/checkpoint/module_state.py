"""What the forward of a module depends on besides its inputs, restored for the recomputation."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from .._torch_private import hook_dicts, is_managed_by_fsdp


class ModuleState:
    """The training mode, the forward hooks and the parameters of a module, and which of them require a gradient."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.training = module, module.training
        self.parameter_ids = _parameter_ids(module)
        self.requires_grad = _requires_grad(module)
        # A lazy module's own hook initializes it and is removed, never to be called again.
        self.hooks = None if isinstance(module, LazyModuleMixin) else [dict(hooks) for hooks in hook_dicts(module)]

    def has_other_parameters(self) -> bool:
        """Return True if parameters have been replaced. FSDP replaces them by gathered ones, with the same values."""
        return _parameter_ids(self.module) != self.parameter_ids and not is_managed_by_fsdp(self.module)

    def restore(self) -> "ModuleState | None":
        """Restore this state. Return the state before, or None if it was this one."""
        module = self.module
        requires_grad = _requires_grad(module)
        same_hooks = self.hooks is None or self.hooks == hook_dicts(module)
        if same_hooks and module.training is self.training and requires_grad == self.requires_grad:
            return None
        before = ModuleState(module)
        module.training = self.training
        for hooks, saved in zip(hook_dicts(module), self.hooks or (), strict=False):
            hooks.clear()
            hooks.update(saved)
        if not is_managed_by_fsdp(module):
            for name, required in self.requires_grad.items():
                module._parameters[name].requires_grad_(required)  # pyright: ignore[reportOptionalMemberAccess]
        return before


@contextmanager
def modules_restored(states: Iterable[ModuleState]) -> Iterator[None]:
    """Restore the state of each module in this context."""
    before = [state.restore() for state in states]
    try:
        yield
    finally:
        for state in before:
            if state is not None:
                state.restore()


def _parameter_ids(module: nn.Module) -> dict[str, int]:
    return {name: id(parameter) for name, parameter in module._parameters.items()}


def _requires_grad(module: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in module._parameters.items() if p is not None}
