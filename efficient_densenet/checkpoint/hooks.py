"""Forward hooks inside a checkpointed function fire once, unless the recomputation needs them."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._recompute_mode import is_in_user_context, is_recomputing
from .._torch_private import is_managed_by_fsdp, memory_key, without_dispatch_modes
from .states import RngState
from .trees import flatten


class FireOnceHook:
    """Wraps a forward hook. In the recomputation, the hook fires only if it affected the computation in the forward.

    A hook affects the computation if it returns a value, changes a tensor among its arguments in place, sets an
    attribute of its module (as weight norm and pruning do) or draws a random number. Such a hook fires in the
    recomputation too. `isinstance` and attribute access see the wrapped hook.

    Inside the contexts of a `context_fn`, dispatch modes do not see the operations of hooks. Selective checkpointing
    counts operations, and a hook that does not fire again would change the count.
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

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        if is_recomputing() and not self.affects_computation:
            return None
        with without_dispatch_modes() if is_in_user_context() else nullcontext():
            if is_recomputing():
                return self.hook(module, *args)
            before = _snapshot(module, args)
            rng_state = RngState((*flatten(args)[0], *module._parameters.values()), with_host=True)
            result = self.hook(module, *args)
            if result is not None or _snapshot(module, args) != before or rng_state.has_changed():
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
            hooks[key] = _unwrapped(hook)


def has_affecting_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return True if a forward hook may affect the computation, for example by undoing a change that a pre-hook made.

    The recomputation must call such a hook too, so it has to run to the end. FSDP's hooks handle recomputations.
    """
    hooked = (module for module in modules if module._forward_hooks and not is_managed_by_fsdp(module))
    return any(getattr(hook, "affects_computation", True) for each in hooked for hook in each._forward_hooks.values())


def _unwrapped(hook: Any) -> Callable:
    return hook.hook if type(hook) is FireOnceHook else hook


def _snapshot(module: nn.Module, args: tuple) -> tuple:
    """Return the identities of all values of the module and the arguments, and the versions of the tensors."""
    values = (*vars(module).values(), *module._parameters.values(), *module._buffers.values(), *flatten(args)[0])
    tensors = [(memory_key(v), v._version) for v in values if isinstance(v, Tensor) and not is_lazy(v)]
    return [id(value) for value in values], tensors
