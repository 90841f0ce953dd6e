"""What a function reads besides its arguments, noted in its first run and restored for its second."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


class RandomState:
    """Where the generators stand: the CPU's, those of every device that `tensors` live on, and those given."""

    def __init__(self, tensors: Iterable[Any], generators: Iterable[torch.Generator] = ()) -> None:
        devices = {t.device for t in tensors if isinstance(t, Tensor)}
        self.sources = [torch.default_generator, *generators, *(_generator_of(d) for d in devices if _draws(d))]
        self.states = [source.get_state() for source in self.sources]

    def has_moved(self) -> bool:
        """Whether anything has been drawn since."""
        return not all(torch.equal(s.get_state(), noted) for s, noted in zip(self.sources, self.states, strict=True))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw again what was drawn from here, then go on from where the generators were."""
        present = [source.get_state() for source in self.sources]
        self._set(self.states)
        try:
            yield
        finally:
            self._set(present)

    def _set(self, states: list[Tensor]) -> None:
        for source, state in zip(self.sources, states, strict=True):
            source.set_state(state)


def _draws(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


def _generator_of(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    return module.default_generators[device.index] if hasattr(module, "default_generators") else _Device(module)


class _Device:
    """A device with a single generator of its own, such as MPS, seen as one."""

    def __init__(self, module: Any) -> None:
        self.get_state, self.set_state = module.get_rng_state, module.set_rng_state


class AutocastState:
    """Autocast as it is now, for the CPU and for every device type among `tensors`; casts are cached as it is now too.

    Without `cache_casts` they are not, so that no cast weight is shared with the code around.
    """

    def __init__(self, tensors: Iterable[Any], cache_casts: bool = True) -> None:
        self.cached = cache_casts and torch.is_autocast_cache_enabled()
        types = {"cpu", *(t.device.type for t in tensors if isinstance(t, Tensor))}
        self.states = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in types
            if torch.amp.is_autocast_available(kind)
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, (dtype, enabled) in self.states.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cached))
            yield
