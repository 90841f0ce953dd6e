"""Converted transitions: modules that read a converted block's output, wherever the author's forward calls them.

A transition is recognized by its modules (norm, activation, 1×1 convolution, dropout, pooling) and verified by a trace.
It joins the stage of the block before it in an nn.Sequential, and elsewhere it is a stage of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .._compilers import may_read_converted_modules
from .._mixins import add_mixin, remove_mixin
from ..engine import choose
from ..engine.parts import ConsumerParts, NoPartsError, activations_of, is_activation, is_norm
from .errors import VerificationError
from .guard import guard_of, settings_of
from .read import POOLS, Transition, consumer_parts, read_transition
from .structure import convolutions_in, is_any_norm, why_not_traced
from .trace import describe_difference, samples, tracing
from .verified import Verified, VerifiedModule

TRACED_SIZE = 5
"""Pixels a side: enough to pool, and odd, so that pooling with ceil_mode gives another size."""


@dataclass
class TransitionConversion(Verified):
    """The state of a converted transition, and what its forward calls."""

    calls: Transition | None = None


class ConvertedTransition(VerifiedModule):
    """Mixin: a transition that the shared engine runs where its own forward would save large tensors for backward."""

    _conversion: TransitionConversion

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = None
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and not self.reads_class_of(args[0]):
            output = choose.run_consumer(self, args[0])
        return super().forward(*args, **kwargs) if output is None else output

    def read_state(self) -> tuple[Any, ...]:
        """What `consumer_parts` depends on besides the modules inside; the engine compares it at every forward."""
        return self._state_change(), self._conversion.calls

    def consumer_parts(self) -> ConsumerParts | None:
        """The parts for the engine; None if the state has changed since the conversion."""
        if not may_read_converted_modules():
            return None
        calls = self._conversion.calls
        return None if calls is None or self._state_change() is not None else consumer_parts(self, calls)


def convert_transition(module: nn.Module) -> bool:
    """Convert `module` if it is a transition, and return whether it is."""
    conversion = _find(module, module.forward)
    if conversion is not None:
        add_mixin(module, ConvertedTransition)
        cast(ConvertedTransition, module)._conversion = conversion
    return conversion is not None


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


def _find(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> TransitionConversion | None:
    """What `forward` calls; None if `module` is no transition."""
    width = transition_width(module)
    if width is None or why_not_traced(module) is not None:
        return None
    try:
        with tracing(module, samples(module, width, [TRACED_SIZE])[0]) as run:
            traces = list(run.runs_of_author(forward))
            calls = read_transition(module, run.table, traces)
            parts = consumer_parts(module, calls)
            is_known = is_norm(parts.norm) and all(map(is_activation, parts.activations))
            if not is_known or describe_difference(traces, run, partial(_run, module, calls)):
                return None
        guard = guard_of(module, run.ran.values(), settings_of(module))
        return TransitionConversion(guard, calls) if guard.asks is None else None
    except (NoPartsError, VerificationError):
        return None


def _run(module: nn.Module, calls: Transition, x: Tensor) -> Tensor:
    """The transition's output, from its parts."""
    parts = consumer_parts(module, calls)
    output = parts.norm(x)
    if not activations_of(parts.norm):
        output = cast(nn.Module, parts.activation)(output)
    output = cast(_ConvNd, parts.conv)(output)
    if parts.pools:
        output = POOLS["avg_pool"](output)
    return output if parts.after is None else parts.after(output)
