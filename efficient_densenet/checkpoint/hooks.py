"""Forward hooks inside what is recomputed fire once, unless the computation needs them twice."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .modes import is_recomputing
from .trees import flatten


class FiresOnce:
    """A hook that rests in the second run if all it did in the first was to look.

    One that returned something, wrote into a tensor it was shown, or set a tensor on its module (as weight norm and
    pruning do) is part of the computation and fires again.
    """

    def __init__(self, hook: Callable) -> None:
        self.hook = hook
        self.takes_part = False

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        if is_recomputing():
            return self.hook(module, *args) if self.takes_part else None
        before = _state(module, args)
        result = self.hook(module, *args)
        if result is not None or _state(module, args) != before:
            self.takes_part = True
        return result


def fire_once(module: nn.Module) -> None:
    """Put the forward hooks of `module` under this rule."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if not isinstance(hook, FiresOnce):
                hooks[key] = FiresOnce(hook)


def fire_always(module: nn.Module) -> None:
    """Give the hooks back as they were."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if isinstance(hook, FiresOnce):
                hooks[key] = hook.hook


def _state(module: nn.Module, args: tuple) -> list[tuple[int, int]]:
    """Which tensors the module and the arguments hold, and how often each has been written into."""
    held = (*vars(module).values(), *module._parameters.values(), *module._buffers.values(), *flatten(args)[0])
    return [(id(value), value._version) for value in held if isinstance(value, Tensor)]
