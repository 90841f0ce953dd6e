"""The contexts of a `context_fn`, such as selective checkpointing's, which save the results of chosen operations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._recompute_mode import in_user_context
from .._torch_private import bypass_saved_tensor_hooks, observe_selection
from .states import get_state, set_state

ContextFn = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


class UserContexts:
    """The caller's contexts around the forward and the recomputation.

    The recomputation does not repeat a random operation whose result selective checkpointing has saved. The random
    operations after it must draw the numbers that they drew in the forward, so the generators are set to their state of
    the forward before each of them.
    """

    def __init__(self, context_fn: ContextFn, generators: Sequence[Any]) -> None:
        contexts = tuple(context_fn())
        if len(contexts) != 2:
            raise ValueError(
                f"found {len(contexts)} context managers from context_fn, which must return two: one for the forward "
                "and one for the recomputation"
            )
        self._forward, self._recomputation = contexts
        self._generators = generators
        self._states: list[list[Any]] = []  # before each random operation of the forward
        self._is_saved: list[bool] = []  # whether the result of that operation is saved
        bypass_saved_tensor_hooks(self._forward)
        self._is_selective = observe_selection(*contexts, self._note_selection) and bool(generators)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enter the context of the forward."""
        random = _BeforeRandomOperations(self._save_state) if self._is_selective else nullcontext()
        user_context, self._forward = self._forward, nullcontext()  # breaks a reference cycle
        with in_user_context(), random, user_context:
            yield
        if not any(self._is_saved):
            self._states.clear()

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Enter the context of the recomputation."""
        executed = (state for state, saved in zip(self._states, self._is_saved, strict=False) if not saved)
        random = _BeforeRandomOperations(lambda: self._restore_state(next(executed))) if self._states else nullcontext()
        with in_user_context(), random, self._recomputation:
            yield

    def _note_selection(self, operation: Any, is_saved: bool) -> None:
        if _is_random(operation):
            self._is_saved.append(is_saved)

    def _save_state(self) -> None:
        self._states.append([get_state(generator) for generator in self._generators])

    def _restore_state(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            set_state(generator, state)


class _BeforeRandomOperations(TorchDispatchMode):
    """Calls a function before each random operation. Below a selective mode, it sees only the executed ones."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if _is_random(func):
            self.call()
        return func(*args, **(kwargs or {}))


def _is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())
