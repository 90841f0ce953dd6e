"""Forward hooks inside what is recomputed fire once, unless the computation needs them twice."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._recompute_mode import is_recomputing
from .trees import flatten


class FiresOnce:
    """A hook that rests in the second run if all it did in the first was to look.

    One that returned something, wrote into a tensor it was shown, set something on its module (as weight norm and
    pruning do) or drew a random number is part of the computation and fires again. It passes for the hook it holds.
    """

    def __init__(self, hook: Callable) -> None:
        self.hook = hook
        self.takes_part = False

    @property
    def __class__(self) -> type:
        return type(self.hook)

    def __getattr__(self, name: str) -> Any:
        if name in ("hook", "takes_part") or name.startswith("__"):
            raise AttributeError(name)  # not there yet, while a copy is being made
        return getattr(self.hook, name)

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
            if type(hook) is not FiresOnce:
                hooks[key] = FiresOnce(hook)


def fire_always(module: nn.Module) -> None:
    """Give the hooks back as they were."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if type(hook) is FiresOnce:
                hooks[key] = hook.hook


def _state(module: nn.Module, args: tuple) -> tuple:
    """What the module and the arguments hold, how often each tensor has been written into, and the random stream."""
    held = (*vars(module).values(), *module._parameters.values(), *module._buffers.values(), *flatten(args)[0])
    tensors = [(v.data_ptr(), v._version) for v in held if isinstance(v, Tensor) and not is_lazy(v)]
    return [id(value) for value in held], tensors, torch.default_generator.get_state().tolist()[:5]
