"""The random generators that a block may draw from, besides PyTorch's default generators.

A recomputation restores the states of PyTorch's default generators only. A trial finds out whether a block draws from
other generators, and restores the states of all of them.
"""

import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..checkpoint.states import get_state, host_generators, is_same_state, set_state
from .outside import values_outside


class Generators:
    """The states of some generators, to be compared and restored."""

    def __init__(self, generators: Iterable[Any]) -> None:
        self._states: dict[int, tuple[Any, Any]] = {}
        for generator in generators:
            self.add(generator)

    def add(self, generator: Any) -> None:
        """Save the state of another generator, such as one that an operation is about to draw from."""
        if id(generator) not in self._states and generator is not torch.default_generator:
            self._states[id(generator)] = generator, get_state(generator)

    def changed(self) -> str | None:
        """The name of a generator that has drawn numbers since it was added, such as "NumPy's generator", or None."""
        return next((_name(each) for each, state in self._states.values() if _has_changed(each, state)), None)

    def restore(self) -> None:
        for generator, state in self._states.values():
            if _has_changed(generator, state):
                set_state(generator, state)


def generators_of(block: nn.Module) -> list[Any]:
    """Python's and NumPy's global generators, and the generators that modules hold or their methods refer to."""
    return [*host_generators(), *filter(_is_generator, _values_read(block))]


def without_state(block: nn.Module) -> str | None:
    """The class of an object that the block may read and whose values cannot be repeated, such as an iterator: it has
    no state to restore. None if there is none."""
    unrepeatable = (each for each in _values_read(block) if isinstance(each, (Iterator, random.SystemRandom)))
    return next((type(each).__name__ for each in unrepeatable), None)


def _values_read(block: nn.Module) -> Iterator[Any]:
    values = [value for module in block.modules() for value in vars(module).values()]
    for cls in {cls for module in block.modules() for cls in type(module).__mro__}:
        values += [*vars(cls).values(), *values_outside(cls)]
    return _leaves(values)


def _leaves(value: Any, depth: int = 4) -> Iterator[Any]:
    value = list(value.values()) if isinstance(value, dict) else value
    if depth and isinstance(value, (list, tuple)) and len(value) <= (_MANY if depth < 4 else len(value)):
        for each in value:
            yield from _leaves(each, depth - 1)
    else:
        yield value


def _is_generator(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    return (type(value).__module__ or "").startswith("numpy.random") and hasattr(value, "random")


def _has_changed(generator: Any, state: Any) -> bool:
    return not is_same_state(get_state(generator), state)


def _name(generator: Any) -> str:
    if generator is random:
        return "Python's generator"
    return "NumPy's generator" if generator in host_generators() else f"a {type(generator).__name__} of its own"


def seed() -> None:
    """Set all generators from which a forward draws that names none."""
    has_accelerator = torch.accelerator.is_available()
    (torch.manual_seed if has_accelerator else torch.default_generator.manual_seed)(0)  # torch.manual_seed is slow
    random.seed(0)
    if "numpy" in sys.modules:  # some implementations of stochastic depth draw from it
        sys.modules["numpy"].random.seed(0)


def random_states(device: torch.device) -> list[Any]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


_MANY = 100
