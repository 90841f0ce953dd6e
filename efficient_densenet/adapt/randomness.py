"""The random generators that a block may draw from, besides PyTorch's default generators.

A recomputation restores the states of PyTorch's default generators only. A trial finds out whether a block draws from
other generators, and restores the states of all of them.
"""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..checkpoint.states import host_generators
from .outside import values_outside


def generators_of(block: nn.Module) -> list[Any]:
    """Python's and NumPy's global generators, and the generators that modules hold or their methods refer to."""
    own = {id(each): each for each in _values_read(block) if _is_generator(each)}
    return [*host_generators(), *own.values()]


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
        return value is not torch.default_generator
    return (type(value).__module__ or "").startswith("numpy.random") and hasattr(value, "random")


def seed() -> None:
    """Set PyTorch's default generators."""
    has_accelerator = torch.accelerator.is_available()
    (torch.manual_seed if has_accelerator else torch.default_generator.manual_seed)(0)  # torch.manual_seed is slow


def random_states(device: torch.device) -> list[Any]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


_MANY = 100
