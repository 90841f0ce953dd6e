"""Forward hooks inside a checkpointed function fire once, unless they take part in the computation: those that return a
value, change a tensor among their arguments or an attribute of their module, as weight norm does, or draw a random
number fire in the recomputation too."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states

from .._recompute_mode import state
from .._torch_private import memory_key, without_dispatch_modes

Hooks = dict[nn.Module, dict[str, OrderedDict[int, Callable]]]
"""The forward hooks of modules, by the attributes that hold them."""


class Watched(NamedTuple):
    """A hook at a key of a module's hooks, and what watches it during a forward."""

    hooks: OrderedDict[int, Callable]
    key: int
    hook: Callable
    watch: Callable


def hooks_by_run(modules: Iterable[nn.Module]) -> tuple[list[Watched], Hooks]:
    """The hooks of modules for a forward, and those for its recomputation, which the forward fills."""
    forward, again = list[Watched](), Hooks()
    for module in modules:
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(module, name)
            if hooks:
                needed = again.setdefault(module, {})[name] = OrderedDict[int, Callable]()
                forward += [
                    Watched(hooks, key, each, partial(_watch, each, key, needed)) for key, each in hooks.items()
                ]
    return forward, again


@contextmanager
def watching(watched: Sequence[Watched]) -> Iterator[None]:
    """Watch hooks in their places: one that removes itself is removed, and one that is added stays."""
    for each in watched:
        each.hooks[each.key] = each.watch
    try:
        yield
    finally:
        for each in watched:
            if each.hooks.get(each.key) is each.watch:
                each.hooks[each.key] = each.hook


def _watch(hook: Callable, key: int, again: OrderedDict[int, Callable], module: nn.Module, *args: Any) -> Any:
    """Call a hook in a forward, and let it fire again if it takes part in the computation."""
    before = _snapshot(module, args)
    result = _call(hook, module, *args)
    if result is not None or _snapshot(module, args) != before:
        again[key] = partial(_call, hook)
    return result


def _call(hook: Callable, module: nn.Module, *args: Any) -> Any:
    """Call a hook. Tensors that it saves for backward are saved, and not recomputed, since it may not fire again. For
    the same reason dispatch modes of a `context_fn` do not see its operations, which selective checkpointing counts."""
    modes = without_dispatch_modes() if state.is_selective else nullcontext()
    with modes, saved_tensors_hooks(_identity, _identity):
        return hook(module, *args)


def _identity(value: Any) -> Any:
    return value


def _snapshot(module: nn.Module, args: tuple) -> tuple:
    """The identities of all values of the module and the arguments, the versions of the tensors, which those of
    inference mode do not have, and the states of the random generators."""
    values = (*vars(module).values(), *module._parameters.values(), *module._buffers.values(), *tree_leaves(args))
    tensors = [each for each in values if isinstance(each, Tensor) and not each.is_inference()]
    with without_dispatch_modes():  # FakeTensorMode has no values to compare
        states = torch.get_rng_state(), *get_device_states(*tensors)[1]
        random = [each.numpy().tobytes() for each in states]
    return [id(value) for value in values], [(memory_key(each), each._version) for each in tensors], random
