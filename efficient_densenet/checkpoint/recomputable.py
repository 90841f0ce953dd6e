"""A call that `torch.utils.checkpoint` makes in the forward and repeats in each recomputation, in the same state.

Torch's function restores autocast, saves the arguments, and ends the recomputation early. Here are the states of
modules, random generators (where random numbers were drawn), and tensors that need no recomputation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .._recompute_mode import checkpointed_forward, in_user_context, recomputing
from .._torch_private import base_of, tensor_hooks, top_saved_tensors_hooks
from .module_state import ModuleState, modules_restored
from .states import GeneratorStates, default_generators, host_generators

ContextFn = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


@dataclass
class Options:
    """The options of `checkpoint`."""

    preserve_rng_state: bool = True
    generators: Sequence[torch.Generator] = ()
    offload: bool = False
    early_stop: bool = True
    context_fn: ContextFn | None = None
    determinism_check: str = "default"
    debug: bool = False


DEFAULTS = Options()


def flatten(args: tuple, kwargs: dict[str, Any]) -> tuple[Sequence[Any], TreeSpec | None]:
    """Return the leaves of the arguments, and the spec from which `RecomputableCall` rebuilds the arguments."""
    if not kwargs and all(isinstance(value, Tensor) for value in args):
        return args, None  # the usual call: flattening would take longer
    return tree_flatten((args, kwargs))


class RecomputableCall:
    """Calls a function with the arguments that have given leaves: once in the forward, then in recomputations.

    It does not hold the leaves, which `torch.utils.checkpoint` saves. An error of the forward is kept in `error`, for
    the caller to raise: before 2.14, torch's function leaves its saved-tensor hooks active if the forward raises.
    """

    def __init__(
        self,
        function: Callable,
        leaves: Sequence[Any],
        spec: TreeSpec | None,
        modules: Sequence[nn.Module],
        options: Options,
    ) -> None:
        self.function, self.spec, self.options, self.is_forward = function, spec, options, True
        self.error: BaseException | None = None
        self.states = [ModuleState(module) for module in modules]
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        self.bases = [base_of(each) for each in tensors if base_of(each) is not each]
        hosts = host_generators() if any(state.has_hooks() for state in self.states) else ()
        generators = [*default_generators(leaves), *options.generators, *hosts] if options.preserve_rng_state else ()
        self.generators = GeneratorStates(generators)
        self.random_states: list[GeneratorStates] = []

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = (leaves, {}) if self.spec is None else tree_unflatten(leaves, self.spec)
        if not self.is_forward:
            return self._recompute(leaves, args, kwargs)
        self.is_forward = False
        try:
            with checkpointed_forward():
                result = self._run(args, kwargs, self._save_random_state)
        except BaseException as error:
            self.error = error
            return None
        for state in self.states:
            state.update_after_forward()
        if not self.generators.have_changed():
            self.generators = GeneratorStates(())  # the function drew no random numbers
        return result

    def _recompute(self, leaves: Sequence[Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        for state in self.states:
            state.check_parameters(self.function)
        states = iter(self.random_states)
        with recomputing(), modules_restored(self.states), self.generators.restored(), _without_new_hooks(leaves):
            return self._run(args, kwargs, lambda: next(states).set())

    def _run(self, args: tuple, kwargs: dict[str, Any], before_random_operation: Callable[[], None]) -> Any:
        if self.options.context_fn is None:
            with parameters_saved(self.bases):
                return self.function(*args, **kwargs)
        restores = self.options.preserve_rng_state
        random_operations = _RandomOperations(before_random_operation) if restores else nullcontext()
        with in_user_context(), parameters_saved(self.bases), random_operations:
            return self.function(*args, **kwargs)

    def _save_random_state(self) -> None:
        self.random_states.append(GeneratorStates(self.generators.generators))


class _RandomOperations(TorchDispatchMode):
    """Calls a function before each random operation.

    Selective checkpointing, below this mode, does not repeat a random operation whose result it has saved. So each
    random operation of a recomputation is given the state of the generators that it had in the forward.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.call()
        return func(*args, **(kwargs or {}))


def parameters_saved(bases: Sequence[Tensor]) -> AbstractContextManager:
    """Return a context in which leaves that require a gradient, such as parameters, and views of them are saved.

    Saving them takes no memory, and a backward then uses them as without checkpointing: it has the values that a hook
    has put back since the forward, and notices a change in place. All other tensors go to the hooks around, which are
    those of `torch.utils.checkpoint`; so do views of `bases`, of which arguments are views: in a recomputation inside
    another one, an argument is no view any more.
    """
    hooks = top_saved_tensors_hooks()
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks

    def pack_others(tensor: Tensor) -> Any:
        base = base_of(tensor)
        is_saved = tensor.requires_grad and base.is_leaf and not any(base is each for each in bases)
        return _Saved(tensor) if is_saved else pack(tensor)

    return saved_tensors_hooks(pack_others, lambda saved: saved.get() if type(saved) is _Saved else unpack(saved))


class _Saved:
    """A tensor that is saved as it is, and its version."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of shape {tuple(self.tensor.shape)} that a checkpointed function uses is at version "
                f"{self.tensor._version}; expected version {self.version} instead"
            )
        return self.tensor


@contextmanager
def _without_new_hooks(leaves: Sequence[Any]) -> Iterator[None]:
    """Remove the `register_hook` hooks of tensors that were added in this context: the forward has registered them."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    before = [set(tensor_hooks(tensor) or ()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, kept in zip(tensors, before, strict=True):
            hooks = tensor_hooks(tensor) or {}
            for key in hooks.keys() - kept:
                del hooks[key]
