"""Converted transitions: modules that read a converted block's output, wherever the author's forward calls them.

A transition is recognized by its modules (norm, activation, 1×1 convolution, dropout, pooling) and verified by a trial.
It joins the stage of the block before it in an nn.Sequential, and elsewhere it is a stage of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .._compilers import may_read_converted_modules
from .._dimensions import classes, dimensions_of
from .._mixins import add_mixin, remove_mixin
from ..engine import choose
from ..engine.parts import ConsumerParts, NoPartsError, activations_of, composed, halves, is_activation, is_norm
from .fingerprint import fingerprint
from .layer_parts import leaf_modules, read_layer
from .sample import Sample
from .trial import VerificationError, trial
from .verified import Verified, VerifiedModule
from .verify import describe_difference

TRIAL_SIZE = 5
"""Pixels a side: enough to pool, and odd, so that pooling with ceil_mode gives another size."""


@dataclass
class TransitionConversion(Verified):
    """The state of a converted transition; `pool` is the name of the pooling function that its forward calls, or ""."""

    pool: str = ""


class ConvertedTransition(VerifiedModule):
    """Mixin: a transition that the shared engine runs wherever its own forward would save much memory for backward."""

    _conversion: TransitionConversion

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = None
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            output = choose.run_consumer(self, args[0])
        return super().forward(*args, **kwargs) if output is None else output

    def consumer_parts(self) -> ConsumerParts | None:
        """The parts for the engine; None if the state has changed since the conversion."""
        if not may_read_converted_modules():
            return None
        return None if self._state_change() is not None else _read(self, self._conversion.pool)


def convert_transition(module: nn.Module) -> bool:
    """Convert `module` if it is a transition, and return whether it is."""
    pool = _find_pool(module, module.forward)
    if pool is not None:
        add_mixin(module, ConvertedTransition)
        cast(ConvertedTransition, module)._conversion = TransitionConversion(fingerprint(module), pool)
    return pool is not None


def restore_transition(module: ConvertedTransition) -> None:
    """Undo `convert_transition`."""
    remove_mixin(module, ConvertedTransition)
    vars(module).pop("_conversion", None)


def transition_width(module: nn.Module) -> int | None:
    """The channels that a module with the structure of a transition reads; None for any other module."""
    parts = _read(module, "")
    return None if parts is None else cast(_ConvNd, parts.conv).in_channels


def _find_pool(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> str | None:
    """The name of the pooling function that `forward` calls, "" for none, and None if `module` is no transition."""
    parts = _read(module, "")
    if parts is None or "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        return None
    try:
        with trial(module, Sample(cast(_ConvNd, parts.conv).in_channels, TRIAL_SIZE)) as run:
            results = list(run.run(forward))
            for pool in ("", *_POOL_FUNCTIONS):
                if describe_difference(results, run, partial(_run, module, pool)) is None:
                    return pool
    except VerificationError:
        pass
    return None


def _run(module: nn.Module, pool: str, x: Tensor) -> Tensor:
    """The transition's output, from its parts."""
    parts = cast(ConsumerParts, _read(module, pool))
    output = parts.norm(x)
    if not activations_of(parts.norm):
        output = F.relu(output) if parts.activation is None else parts.activation(output)
    output = cast(_ConvNd, parts.conv)(output)
    if parts.pools:
        output = _avg_pool(output)
    return output if parts.after is None else parts.after(output)


def _read(module: nn.Module, pool: str) -> ConsumerParts | None:
    """The parts of a transition. The function named `pool` follows the convolution, unless `pool` is empty."""
    modules = list(leaf_modules(module))
    pools = [each for each in modules if isinstance(each, _POOLS)]
    try:
        layer = read_layer(module, [each for each in modules if each not in pools])
    except NoPartsError:
        return None
    if layer.conv2 is not None or not is_norm(layer.norm1) or set(layer.conv1.kernel_size) != {1} or len(pools) > 1:
        return None
    if not all(map(is_activation, layer.activations)):
        return None
    steps: list[Callable[[Tensor], Tensor]] = [*pools, *([_POOL_FUNCTIONS[pool]] if pool else [])]
    if layer.drop_rate:
        steps.insert(0, lambda x: layer.dropout(x, layer.drop_rate))
    halved = len(steps) > 0 and (steps[0] is _avg_pool or (isinstance(steps[0], nn.Module) and halves(steps[0])))
    return ConsumerParts(layer.norm1, layer.conv1, halved, layer.activations, composed(*steps[halved:]))


def _avg_pool(x: Tensor) -> Tensor:
    return dimensions_of(x).avg_pool(x, 2)


def _max_pool(x: Tensor) -> Tensor:
    return dimensions_of(x).max_pool(x, 2)


_POOL_FUNCTIONS = {"avg_pool": _avg_pool, "max_pool": _max_pool}
_POOLS = (*classes("AvgPool"), *classes("MaxPool"))
