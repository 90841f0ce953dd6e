"""Find out by a trace how a block's forward uses its layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _LazyNormBase, _NormBase

from .._mixins import add_mixin
from ..checkpoint.call import checkpoint_call
from ..engine import layerwise
from ..engine.choose import Engine
from ..engine.limits import why_not_parametrized
from ..engine.parts import NoPartsError
from ..kernels.activations import ActivationSpec
from ..norms.batch_norm import UpdatesOnce, undo_update_once
from .errors import NotRunError, SideEffectError, VerificationError
from .expressions import Expression
from .guard import Guard, guard_of, positions, settings_of
from .layers import run_layers
from .read import Parts, block_parts, check_output, read_parts
from .recipes import WHOLE, Recipe, read_recipe, run_recipe
from .structure import channels_read, looks_dense
from .trace import Trace, Tracer, describe_difference, samples, tracing
from .verified import Verified


@dataclass
class Conversion(Verified):
    """The state of a converted block.

    Attributes:
        engine: the requested engine.
        exactly_once_norms: the names of norms that were under the exactly-once rule before; None for all of them.
        pattern: how the block's forward uses its layers; None if a trace did not find out.
        whole_layers: how to call whole layers where the parts describe them too, if engines that recompute should.
        saved: the values per pixel that the author's forward, and recomputed whole layers, save for backward.
        reason: why the parts of the layers do not describe the block, or None if they do.
        recomputes: whether the author's forward checkpoints by itself, and so would update its norms twice.
        kept_bottlenecks: the positions of the layers whose bottlenecks the shared engine saves, as a budget decides.
    """

    engine: Engine | None = None
    exactly_once_norms: tuple[str, ...] | None = None
    pattern: Parts | Recipe | None = None
    whole_layers: Recipe | None = None
    saved: tuple[int, int] = (0, 0)
    reason: str | None = None
    recomputes: bool = False
    kept_bottlenecks: frozenset[int] | None = None


def find(
    block: nn.Module,
    forward: Callable[[Tensor], Tensor],
    kinds: Sequence[type | Recipe] = (Parts, Recipe),
    reason: str | None = None,
) -> Conversion:
    """How `forward`, the author's, uses the layers of `block`: the first of `kinds` that computes the same expressions.
    `reason` is why not by the parts of layers.

    Norms are under the exactly-once rule in the trace, so that a library's checkpointing, which updates them twice,
    does not count as a difference.
    """
    parametrized = next(filter(None, map(why_not_parametrized, block.modules())), None)
    if parametrized is not None and kinds == (Parts, Recipe):  # no engine runs by parts there
        kinds, reason = (Recipe, Parts), parametrized
    before = tuple(name for name, module in block.named_modules() if isinstance(module, UpdatesOnce))
    first_failure = None
    try:
        update_norms_once(block)
        for sample in samples(block, channels_read(block)):
            with tracing(block, sample) as run:
                try:
                    traces = list(run.runs_of_author(forward))
                except NotRunError as failure:
                    first_failure = first_failure or failure
                    continue
                output = traces[0].output
                channels = run.table.shapes[output][1] if isinstance(output, Expression) else 0
                if not looks_dense(block) and channels <= sample.channels:
                    raise VerificationError("returns no more channels than it takes")
                found = _match(block, forward, traces, run, kinds, reason)
                pattern, saved = cast(Parts | Recipe, found.pattern), run.saved_values_per_pixel(forward)
                recomputed = partial(run_pattern, block, forward, pattern, True)
                kept = run.saved_values_per_pixel(recomputed) if isinstance(pattern, Recipe) else 0
            return replace(found, saved=(saved, kept), verified=_guard(block, run, pattern))
        raise cast(NotRunError, first_failure)
    finally:
        restore_norms(block, before)


def _guard(block: nn.Module, run: Tracer, pattern: Parts | Recipe | None) -> Guard:
    """What `pattern` depends on: by parts too, rates of dropout that are none of the layers', and the settings of any
    module from which the constant of a function may come."""
    if not isinstance(pattern, Parts) or not pattern.layers:
        return guard_of(block, run.ran.values())
    specs = [each.activation for layer in pattern.layers for each in layer.units]
    has_constants = any(isinstance(each, ActivationSpec) and (each.a or each.b) for each in specs)
    numbers, dropouts = positions(block), [layer.dropout for layer in pattern.layers if layer.dropout]
    live = frozenset((numbers[block.get_submodule(each.module)], each.attribute) for each in dropouts)
    guard = guard_of(block, run.ran.values(), settings_of(block) if has_constants else ())
    return guard._replace(live=live)


def update_norms_once(block: nn.Module) -> None:
    """Put the norms in `block` under the exactly-once rule. (`update_once` would change the names of their classes.)"""
    for module in block.modules():
        if isinstance(module, _NormBase) and not isinstance(module, (UpdatesOnce, _LazyNormBase)):
            add_mixin(module, UpdatesOnce, innermost=True)


def _match(
    block: nn.Module,
    forward: Callable[[Tensor], Tensor],
    traces: Sequence[Trace],
    run: Tracer,
    kinds: Sequence[type | Recipe],
    reason: str | None,
) -> Conversion:
    """The pattern by which an engine computes the same expressions; and why not by the parts of layers, if so."""
    difference = None
    for kind in kinds:
        try:
            if kind is Parts and run.guard.asks is not None:
                raise NoPartsError(f"found that it {run.guard.asks}")
            if isinstance(kind, Recipe):
                pattern: Parts | Recipe = kind
                check_output(traces[0].output) if not looks_dense(block) else None
                if not looks_dense(block) and traces[0].input not in run.table.parts(traces[0].output, 1):
                    raise NoPartsError("found no concatenation of its input and new features")
            else:
                pattern = (
                    read_parts(block, run.table, traces) if kind is Parts else read_recipe(block, run.table, traces[1])
                )
        except NoPartsError as failure:
            reason = reason or str(failure)
            continue
        found = describe_difference(traces, run, partial(run_pattern, block, forward, pattern, True))
        if found is None:
            recomputes = any(trace.recomputes for trace in traces)
            return Conversion(
                pattern=pattern, reason=None if kind is Parts and reason is None else reason, recomputes=recomputes
            )
        if isinstance(pattern, Recipe):
            called = partial(run_pattern, block, forward, pattern, False)
            if describe_difference(traces, run, called) is None:
                raise SideEffectError(f"has layers that must not be recomputed: it {found}")
        difference = difference or found
        if kind is Parts:
            reason = f"found that by the parts of its layers it {found}"
    raise VerificationError(reason or difference)


def run_pattern(
    block: nn.Module, forward: Callable[[Tensor], Tensor], pattern: Parts | Recipe, recomputed: bool, x: Tensor
) -> Tensor:
    """The output of `block` by `pattern`. If `recomputed`, layers are recomputed for gradients, where engines would."""
    # In evaluation mode, parts compute the same again: there is no dropout, and no statistic to update.
    recomputed = recomputed and (block.training or isinstance(pattern, Recipe))
    recomputed = recomputed and torch.is_grad_enabled() and layerwise.why_not_recompute(block) is None
    if pattern == WHOLE:
        return checkpoint_call(forward, (x,), {}) if recomputed else forward(x)
    run_first_half = layerwise.run_first_half_checkpoint if recomputed else layerwise.run_first_half_plain
    if isinstance(pattern, Parts):
        return run_layers(block_parts(block, pattern), x, run_first_half)
    return run_recipe(block, pattern, x, run_first_half)


def restore_norms(block: nn.Module, exactly_once: tuple[str, ...]) -> None:
    """Give the norms in `block` their classes back, except those named in `exactly_once`."""
    for name, module in block.named_modules():
        if isinstance(module, UpdatesOnce) and name not in exactly_once:
            undo_update_once(module)
