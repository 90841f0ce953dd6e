"""The states of random generators: saved in a forward, restored for its recomputation."""

import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._torch_private import without_dispatch_modes


class GeneratorStates:
    """The states of some generators of PyTorch, Python or NumPy."""

    def __init__(self, generators: Iterable[Any]) -> None:
        self.generators = list(generators)
        self.states = [get_state(generator) for generator in self.generators]

    def have_changed(self) -> bool:
        """Return True if a random number has been drawn since the states were saved."""
        with without_dispatch_modes():  # FakeTensorMode has no values to compare
            return not all(map(is_same_state, GeneratorStates(self.generators).states, self.states))

    def set(self) -> None:
        """Set the generators to the saved states."""
        for generator, state in zip(self.generators, self.states, strict=True):
            set_state(generator, state)

    def restored(self) -> AbstractContextManager:
        """Return a context in which the saved states are set, and after which the current states are."""
        return self._restored() if self.generators else nullcontext()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        current = GeneratorStates(self.generators)
        self.set()
        try:
            yield
        finally:
            current.set()


def default_generators(values: Iterable[Any]) -> list[Any]:
    """Return PyTorch's default generators of the CPU and of the device of each tensor among `values`."""
    devices = {value.device for value in values if isinstance(value, Tensor)}
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    return [torch.default_generator, *(each for device in accelerators for each in _generators_of(device))]


def _generators_of(device: torch.device) -> Sequence[Any]:
    module = torch.get_device_module(device)
    if not hasattr(module, "default_generators"):
        return [_DeviceGenerator(module)]
    return module.default_generators[device.index : device.index + 1]  # none if the device of a fake tensor is absent


class _DeviceGenerator:
    """The single generator of a device type such as MPS, with the methods of `torch.Generator`."""

    def __init__(self, module: Any) -> None:
        self.get_state, self.set_state = module.get_rng_state, module.set_rng_state


def host_generators() -> list[Any]:
    """Return Python's global generator, and NumPy's if it is imported."""
    return [random, *([sys.modules["numpy"].random] if "numpy" in sys.modules else [])]


def get_state(generator: Any) -> Any:
    """Return the state of a generator of Python, PyTorch or NumPy."""
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def set_state(generator: Any, state: Any) -> None:
    """Set the state that `get_state` has returned."""
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def is_same_state(state: Any, other: Any) -> bool:
    """Return True if two states of one generator are equal. NumPy's contain arrays, for which == is no single bool."""
    return torch.equal(state, other) if isinstance(state, Tensor) else pickle.dumps(state) == pickle.dumps(other)
