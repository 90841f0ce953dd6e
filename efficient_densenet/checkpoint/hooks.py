"""Forward hooks inside a checkpointed function fire once, unless the recomputation needs them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states

from .._recompute_mode import is_recomputing, state
from .._torch_private import memory_key, without_dispatch_modes


class FireOnceHook:
    """Wraps a forward hook. In the recomputation, the hook fires only if it affected the computation in the forward.

    A hook affects the computation if it returns a value, changes a tensor among its arguments in place, sets an
    attribute of its module (as weight norm and pruning do) or draws a random number. Such a hook fires in the
    recomputation too. `isinstance` and attribute access see the wrapped hook.

    Tensors that a hook saves for backward are saved, and not recomputed, since the hook may not fire again. For the
    same reason, dispatch modes of a `context_fn` do not see its operations: selective checkpointing counts operations.
    """

    def __init__(self, hook: Callable) -> None:
        self.hook = hook
        self.affects_computation = False

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] (a proxy has no setter)
        return type(self.hook)

    def __getattr__(self, name: str) -> Any:
        if name in ("hook", "affects_computation") or name.startswith("__"):
            raise AttributeError(name)  # copy and pickle ask for attributes before they are set
        return getattr(self.hook, name)

    def __reduce__(self) -> tuple:
        """Copies and pickles have the hook itself, which a checkpoint wraps again."""
        return _identity, (self.hook,)

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        if is_recomputing() and not self.affects_computation:
            return None
        modes = without_dispatch_modes() if state.is_selective else nullcontext()
        with modes, saved_tensors_hooks(_identity, _identity):
            if is_recomputing():
                return self.hook(module, *args)
            before = _snapshot(module, args)
            result = self.hook(module, *args)
            if result is not None or _snapshot(module, args) != before:
                self.affects_computation = True
            return result


def fire_once(module: nn.Module) -> None:
    """Wrap the forward hooks and forward pre-hooks of `module` in `FireOnceHook`."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if type(hook) is not FireOnceHook:
                hooks[key] = FireOnceHook(hook)


def undo_fire_once(module: nn.Module) -> None:
    """Undo `fire_once`."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = hook.hook if type(hook) is FireOnceHook else hook


def _identity(value: Any) -> Any:
    return value


def _snapshot(module: nn.Module, args: tuple) -> tuple:
    """Return the identities of all values of the module and the arguments, the versions of the tensors, which those of
    inference mode do not have, and the states of the random generators."""
    values = (*vars(module).values(), *module._parameters.values(), *module._buffers.values(), *tree_leaves(args))
    tensors = [each for each in values if isinstance(each, Tensor) and not each.is_inference()]
    with without_dispatch_modes():  # FakeTensorMode has no values to compare
        states = torch.get_rng_state(), *get_device_states(*tensors)[1]
        random = [state.numpy().tobytes() for state in states]
    return [id(value) for value in values], [(memory_key(each), each._version) for each in tensors], random
