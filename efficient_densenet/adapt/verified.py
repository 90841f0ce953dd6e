"""Mixins of converted modules: they have the signature of the author's forward, and a state that a trace has
verified."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._compilers import constant_to_compilers
from .._mixins import ModuleMixin, base_class
from .guard import Guard, change_since, holds_attributes, plain_attributes, reached_by


class KeepsSignature(ModuleMixin):
    """Base of mixins that keep the signature of the author's forward, which tracers inspect."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if base_class(cls) is not cls:  # a class with mixins, not the mixin itself
            cls.forward = _with_signature_of(base_class(cls).forward, cls.forward)


def _with_signature_of(original: Callable, forward: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_converted = isinstance(self, KeepsSignature)  # a method that was bound before stays so after `restore`
        return (forward if is_converted else original)(self, *args, **kwargs)

    return wrapper


class ReadState(NamedTuple):
    """The conversion of a module, the change since its trace, and what its functions reach beyond its attributes."""

    conversion: Any
    change: str | None
    reached: Sequence[Any]


@dataclass
class Verified:
    """The state of a converted module at its last trace; None before the first trace.

    It has no references to modules, so a copy or replica never refers to the original's modules.
    """

    verified: Guard | None = None


class VerifiedModule(KeepsSignature):
    """Mixin: a module that detects whether its state has changed since the last trace."""

    _conversion: Any
    """A `Verified`."""

    def reads_class_of(self, x: Tensor) -> bool:
        """Whether the author's functions may decide by the class of x, which is another than in the trace."""
        guard: Guard | None = self._conversion.verified
        names = "isinstance", "issubclass", "type", "__class__"
        return type(x) is not Tensor and guard is not None and not guard.names.isdisjoint(names)

    def read_state(self, before: "ReadState | None" = None) -> "ReadState":
        """What the parts depend on besides the modules inside, which the engine compares at every forward. It gives
        the state `before` where the modules, their tensors and attributes are the same since."""
        guard = self._conversion.verified
        if before is not None and before.conversion is self._conversion and before.change is None:
            return before._replace(reached=reached_by(guard, self))
        change = self._state_change()
        return ReadState(self._conversion, change, () if change or guard is None else reached_by(guard, self))

    def _state_change(self) -> str | None:
        """The change of the state since the last trace, or None."""
        if torch.compiler.is_compiling():
            holds_attributes(self, self._plain_attributes())  # for the compiler to guard
        return self._state_change_now()

    @constant_to_compilers
    def _plain_attributes(self) -> Any:
        return plain_attributes(self)

    @constant_to_compilers
    def _state_change_now(self) -> str | None:
        before: Guard | None = self._conversion.verified
        return "its layers are others" if before is None else change_since(before, self)
