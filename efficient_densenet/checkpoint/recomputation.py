"""A function that runs once for its value and, later, again in the same state."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .modes import first_run, second_run
from .parameters import modules_of
from .states import AutocastState, RandomState


class Recomputation:
    """`function` takes tensors and gives a tensor or a tuple of tensors; `tensors` are all that it computes with."""

    def __init__(
        self,
        function: Callable[..., Tensor | tuple[Tensor, ...]],
        tensors: Sequence[Any],
        name: str | None = None,
        preserve_rng_state: bool = True,
        generators: Iterable[torch.Generator] = (),
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        if modules is None:
            modules = (m for module in modules_of(function) for m in module.modules())
        self.function = function
        self.name = name or name_of(function)
        self.autocast = AutocastState(tensors)
        self.random = RandomState(tensors, generators) if preserve_rng_state else None
        self.modes = [(module, module.training) for module in modules]
        self.given: list[tuple[torch.Size, torch.dtype]] = []

    def first(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        versions = [tensor._version for tensor in inputs]
        cause = None
        try:
            with first_run(), self.autocast.restored():
                outputs = self.function(*inputs)
        except RuntimeError as exc:
            if "in-place operation" not in str(exc):
                raise
            cause = exc
        if cause or [tensor._version for tensor in inputs] != versions:
            raise RuntimeError(
                f"{self.name} writes into a tensor it was given, in place, so it cannot be run again from what it was "
                "given: make its first operation an out-of-place one, or give it a clone"
            ) from cause
        if self.random is not None and not self.random.has_moved():
            self.random = None  # A function that drew nothing needs nothing restored.
        self.given = _described(_as_tuple(outputs))
        return outputs

    def again(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        replayed = nullcontext() if self.random is None else self.random.replayed()
        with second_run(), self.autocast.restored(), self._modes_restored(), replayed:
            outputs = _as_tuple(self.function(*inputs))
        given = _described(outputs)
        if given != self.given:
            raise RuntimeError(
                f"{self.name} gave {_in_words(given)} when it was recomputed, but {_in_words(self.given)} in its first "
                "run: a checkpointed function must do the same both times"
            )
        return outputs

    @contextmanager
    def _modes_restored(self) -> Iterator[None]:
        """Training mode as in the first run, for a model that has been switched to eval mode before its backward."""
        switched = [(module, mode) for module, mode in self.modes if module.training is not mode]
        for module, mode in switched:
            module.training = mode
        try:
            yield
        finally:
            for module, mode in switched:
                module.training = not mode


def name_of(function: Callable) -> str:
    """What to call a function in a message."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__qualname__", type(function).__name__)


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _described(outputs: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(output.shape, output.dtype) for output in outputs]


def _in_words(outputs: list[tuple[torch.Size, torch.dtype]]) -> str:
    tensors = ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in outputs)
    return f"{len(outputs)} tensor{'' if len(outputs) == 1 else 's'} ({tensors})"
