"""Converted transitions: modules that read a converted block's output, wherever the author's forward calls them.

A transition is recognized by its modules (norm, activation, 1×1 convolution, dropout, pooling) and verified by a trace.
It joins the stage of the block before it in an nn.Sequential, and elsewhere it is a stage of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from .._compilers import may_read_converted_modules
from .._mixins import add_mixin, remove_mixin
from ..engine import choose
from ..engine.parts import ConsumerParts, NoPartsError, activations_of, composed, halves, is_activation, is_norm
from .code import Code
from .errors import VerificationError
from .fingerprint import fingerprint
from .layer_parts import (
    POOL_FUNCTIONS,
    TRANSITION,
    LayerCalls,
    calls_of_layers,
    check_structure,
    read_layer,
    submodule,
)
from .trace import MODES, describe_difference, samples, tracing
from .verified import Verified, VerifiedModule

TRIAL_SIZE = 5
"""Pixels a side: enough to pool, and odd, so that pooling with ceil_mode gives another size."""


@dataclass
class TransitionConversion(Verified):
    """The state of a converted transition, and what its forward calls."""

    calls: LayerCalls | None = None


class ConvertedTransition(VerifiedModule):
    """Mixin: a transition that the shared engine runs wherever its own forward would save much memory for backward."""

    _conversion: TransitionConversion

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = None
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
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
        return None if calls is None or self._state_change() is not None else _read(self, calls)


def convert_transition(module: nn.Module) -> bool:
    """Convert `module` if it is a transition, and return whether it is."""
    calls = _find_calls(module, module.forward)
    if calls is not None:
        add_mixin(module, ConvertedTransition)
        cast(ConvertedTransition, module)._conversion = TransitionConversion(fingerprint(module), calls)
    return calls is not None


def restore_transition(module: ConvertedTransition) -> None:
    """Undo `convert_transition`."""
    remove_mixin(module, ConvertedTransition)
    vars(module).pop("_conversion", None)


def transition_width(module: nn.Module) -> int | None:
    """The channels that a module with the structure of a transition reads; None for any other module."""
    try:
        convolutions = check_structure(module)
    except NoPartsError:
        return None
    is_alone = len(convolutions) == 1 and set(convolutions[0].kernel_size) == {1}
    return convolutions[0].in_channels if is_alone else None


def _find_calls(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> LayerCalls | None:
    """What `forward` calls; None if `module` is no transition."""
    width = transition_width(module)
    if width is None or "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        return None
    if Code([*module.modules()]).by_parts is not None:
        return None
    try:
        with tracing(module, samples(module, width, [TRIAL_SIZE])[0]) as run:
            results = [run.run(forward, mode) for mode in MODES]
            runs = [result.calls for result in results if result.calls is not None]
            (calls,) = calls_of_layers(module, [module], runs, TRANSITION)
            if not _is_read(module, calls) or describe_difference(results, run, partial(_run, module, calls)):
                return None
            return calls
    except (NoPartsError, VerificationError):
        return None


def _is_read(module: nn.Module, calls: LayerCalls) -> bool:
    """Whether the shared engine has the norm and the activation."""
    parts = _read(module, calls)
    return is_norm(parts.norm) and all(map(is_activation, parts.activations))


def _run(module: nn.Module, calls: LayerCalls, x: Tensor) -> Tensor:
    """The transition's output, from its parts."""
    parts = _read(module, calls)
    output = parts.norm(x)
    if not activations_of(parts.norm):
        output = cast(nn.Module, parts.activation)(output)
    output = cast(_ConvNd, parts.conv)(output)
    if parts.pools:
        output = POOL_FUNCTIONS["avg_pool"](output)
    return output if parts.after is None else parts.after(output)


def _read(module: nn.Module, calls: LayerCalls) -> ConsumerParts:
    """The current parts of a transition."""
    layer = read_layer(module, module, calls)
    after = [POOL_FUNCTIONS[each] if isinstance(each, str) else submodule(module, each) for each in calls.after]
    steps = [each for each in after if not isinstance(each, _DropoutNd)]
    if layer.drop_rate:
        before_pooling = len(steps) == len(after) or isinstance(after[0], _DropoutNd)
        dropout, drop_rate = layer.dropout, layer.drop_rate  # not `layer`, which refers to the module
        steps.insert(0 if before_pooling else 1, lambda x: dropout(x, drop_rate))
    halved = len(steps) > 0 and (steps[0] is POOL_FUNCTIONS["avg_pool"] or halves(steps[0]))
    return ConsumerParts(layer.norm1, layer.conv1, halved, layer.activations, composed(*steps[halved:]))
