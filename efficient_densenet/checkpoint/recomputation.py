"""The two runs of a function: what the first one was made in, the second one is made in again, and they must agree."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .._recompute_mode import first_run, second_run
from .states import AutocastState, RandomState
from .trees import flatten

Description = list[tuple[torch.Size, torch.dtype]]


class Recomputation:
    """`tensors` are all that the function computes with, `modules` all that it runs."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        modules: Iterable[nn.Module],
        preserve_rng_state: bool = True,
        generators: Iterable[torch.Generator] = (),
        cache_casts: bool = True,
    ) -> None:
        self.name = name
        self.autocast = AutocastState(tensors, cache_casts)
        self.random = RandomState(tensors, generators) if preserve_rng_state else None
        self.modes = [(module, module.training, _parameter_ids(module)) for module in modules]
        self.given: Description | None = None

    def first(self, function: Callable, inputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run `function`, whose tensor arguments are `inputs`."""
        versions = [tensor._version for tensor in inputs]
        with first_run(), self.autocast.restored():
            result = function(*args, **kwargs)
        if [tensor._version for tensor in inputs] != versions:
            raise RuntimeError(
                f"{self.name} writes into a tensor it was given, in place, so it cannot be run again from what it was "
                "given: make its first operation an out-of-place one, or give it a clone"
            )
        if self.random is not None and not self.random.has_moved():
            self.random = None  # A function that drew nothing needs nothing restored.
        self.given = described(tensors_in(result))
        return result

    def again(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        self._refuse_swapped_parameters()
        replayed = nullcontext() if self.random is None else self.random.replayed()
        with second_run(), self.autocast.restored(), self._modes_restored(), replayed:
            result = function(*args, **kwargs)
        self.refuse_difference("gave", described(tensors_in(result)), self.given)
        return result

    def refuse_difference(self, verb: str, found: Description, expected: Description | None) -> None:
        """`expected` is None, or not all there yet, where a gradient is taken inside the first run."""
        if self.given is not None and found != expected:
            raise RuntimeError(
                f"{self.name} {verb} {_in_words(found)} when it was recomputed, but {_in_words(expected)} in its first "
                "run: a checkpointed function must do the same both times"
            )

    def _refuse_swapped_parameters(self) -> None:
        for module, _, ids in self.modes:
            if _parameter_ids(module) != ids:
                raise RuntimeError(
                    f"{self.name} is recomputed with other parameters than in its first run: those of a "
                    f"{type(module).__name__} have been replaced since, as torch.func.functional_call does when it is "
                    "done; run the backward before that, or do not checkpoint"
                )

    @contextmanager
    def _modes_restored(self) -> Iterator[None]:
        """Training mode as in the first run, for a model that has been switched to eval mode before its backward."""
        switched = [(module, mode) for module, mode, _ in self.modes if module.training is not mode]
        for module, mode in switched:
            module.training = mode
        try:
            yield
        finally:
            for module, mode in switched:
                module.training = not mode


def _parameter_ids(module: nn.Module) -> list[int]:
    return [id(parameter) for parameter in module._parameters.values()]


def name_of(function: Callable) -> str:
    """What to call a function in a message."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    if isinstance(function, functools.partial):
        carried = ", ".join(name_of(value) for value in function.args if isinstance(value, nn.Module))
        return f"{name_of(function.func)}({carried})" if carried else name_of(function.func)
    return getattr(function, "__qualname__", type(function).__name__)


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def described(tensors: Iterable[Tensor]) -> Description:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _in_words(tensors: Description) -> str:
    each = ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors)
    return f"{len(tensors)} tensor{'' if len(tensors) == 1 else 's'} ({each})"
