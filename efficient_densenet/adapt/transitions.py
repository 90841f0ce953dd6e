"""Converted transitions: modules that read a converted block's output, wherever the author's forward calls them.

A transition is recognized by its modules (norm, activation, 1×1 convolution, dropout, pooling) and verified by a trace.
It joins the stage of the block before it in an nn.Sequential, and elsewhere it is a stage of its own.
"""

from typing import Any, cast

from torch import Tensor, nn

from .._compilers import may_read_converted_modules
from .._mixins import add_mixin, remove_mixin
from ..engine import choose
from ..engine.parts import ConsumerParts, NoPartsError
from .errors import VerificationError
from .find import find
from .read import Transition, consumer_parts
from .structure import convolutions_in, is_any_norm, why_not_traced
from .verified import VerifiedModule


class ConvertedTransition(VerifiedModule):
    """Mixin: a transition that the shared engine runs where its own forward would save large tensors for backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = None
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and not self.reads_class_of(args[0]):
            output = choose.run_consumer(self, args[0])
        return super().forward(*args, **kwargs) if output is None else output

    def consumer_parts(self) -> ConsumerParts | None:
        """The parts for the engine; None if the state has changed since the conversion."""
        if not may_read_converted_modules() or self._state_change() is not None:
            return None
        return consumer_parts(self, self._conversion.pattern)


def convert_transition(module: nn.Module) -> bool:
    """Convert `module` if it is a transition, and return whether it is."""
    if transition_width(module) is None or why_not_traced(module) is not None:
        return False
    try:
        conversion = find(module, module.forward, (Transition,))
    except (NoPartsError, VerificationError):
        return False
    add_mixin(module, ConvertedTransition)
    cast(ConvertedTransition, module)._conversion = conversion
    return True


def restore_transition(module: ConvertedTransition) -> None:
    """Undo `convert_transition`."""
    remove_mixin(module, ConvertedTransition)
    vars(module).pop("_conversion", None)


def transition_width(module: nn.Module) -> int | None:
    """The channels that a module with the structure of a transition reads: one norm and one 1×1 convolution, whatever
    else; None for any other module."""
    convolutions, norms = convolutions_in(module), sum(map(is_any_norm, module.modules()))
    is_alone = len(convolutions) == norms == 1 and set(getattr(convolutions[0], "kernel_size", ())) == {1}
    return convolutions[0].in_channels if is_alone else None
