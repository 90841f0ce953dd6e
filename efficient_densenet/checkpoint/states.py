"""Global state that a function depends on: saved in the forward, restored for the recomputation."""

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._torch_private import has_function_mode, without_dispatch_modes


class RngState:
    """The RNG state of the CPU, of the device of each tensor, and of the given generators.

    If `with_host` is True, the states of Python's and NumPy's global generators, from which a hook may draw, are too.
    """

    def __init__(
        self, tensors: Iterable[Any], generators: Iterable[torch.Generator] = (), with_host: bool = False
    ) -> None:
        devices = {t.device for t in tensors if isinstance(t, Tensor)}
        device_generators = (_device_generator(device) for device in devices if _has_own_generator(device))
        host = host_generators() if with_host else ()
        self.generators: list[Any] = [torch.default_generator, *generators, *device_generators, *host]
        self.states = [get_state(generator) for generator in self.generators]

    def has_changed(self) -> bool:
        """Return True if a random number has been drawn since the state was saved."""
        pairs = zip(self.generators, self.states, strict=True)
        with without_dispatch_modes():  # FakeTensorMode has no values to compare
            return not all(is_same_state(get_state(generator), state) for generator, state in pairs)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the saved state in this context, and the current state after it."""
        current = [get_state(generator) for generator in self.generators]
        self._set(self.states)
        try:
            yield
        finally:
            self._set(current)

    def _set(self, states: list[Any]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            set_state(generator, state)


def _has_own_generator(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return False
    # Fake tensors may have a device that this machine lacks, whose module then has no generators.
    return bool(getattr(torch.get_device_module(device), "default_generators", True))


def _device_generator(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    if hasattr(module, "default_generators"):
        return module.default_generators[device.index]
    return _DeviceGenerator(module)


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


class AutocastState:
    """The autocast state of the CPU and of the device type of each tensor.

    Whether autocast caches casts is saved too. If `cache_casts` is False, `restored()` disables that cache, so that
    cast weights are not shared with the code outside.
    """

    def __init__(self, tensors: Iterable[Any], cache_casts: bool = True) -> None:
        self.cache_enabled = cache_casts and torch.is_autocast_cache_enabled()
        device_types = {"cpu", *(t.device.type for t in tensors if isinstance(t, Tensor))}
        self.states = {
            device_type: (torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))
            for device_type in device_types
            if torch.amp.is_autocast_available(device_type)
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the saved state in this context."""
        cache_enabled = self.cache_enabled
        with ExitStack() as stack:
            for device_type, (dtype, enabled) in self.states.items():
                if enabled or torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled))
            yield


class DefaultDevice:
    """The device on which tensors are created, as set by `torch.device(...)` contexts and `set_default_device`."""

    def __init__(self) -> None:
        self.device = _default_device()

    def restored(self) -> AbstractContextManager:
        """Return a context in which tensors are created on this device."""
        return nullcontext() if _default_device() == self.device else self.device


_CPU = torch.device("cpu")


def _default_device() -> torch.device:
    return torch.empty(0).device if has_function_mode() else _CPU
