"""Find out by a trace how a block's forward uses its layers."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _LazyNormBase, _NormBase

from .._mixins import add_mixin
from ..checkpoint.call import checkpoint_call
from ..engine import layerwise
from ..engine.changed_modules import why_not_parametrized
from ..engine.choose import Engine
from ..engine.parts import NoPartsError
from ..kernels.activations import ActivationSpec
from ..norms.batch_norm import UpdatesOnce, undo_update_once
from .code import Code
from .errors import NotRunError, SideEffectError, VerificationError
from .expressions import Expression
from .fingerprint import Fingerprint, fingerprint
from .layer_parts import WHOLE, ConnectionPattern
from .layers import run_layers, run_whole_layers
from .structure import (
    channels_read,
    layers_in,
    looks_dense,
    patterns_by_calls,
    patterns_by_parts,
    read_block,
    with_calls,
)
from .trace import MODES, Sample, Trace, Tracer, describe_difference, samples, tracing
from .verified import Verified


@dataclass
class Conversion(Verified):
    """The state of a converted block.

    Attributes:
        engine: the requested engine.
        exactly_once_norms: the names of norms that were under the exactly-once rule before; None for all of them.
        pattern: how the block's forward uses its layers; None if a trace did not find a pattern.
        whole_layers: how to call whole layers where the parts describe them too, if engines that recompute should.
        sample: the input of the trace, if there was one.
        saved: the values per pixel that the author's forward, and recomputed whole layers, save for backward.
        reason: why the parts of the layers do not describe the block, or None if they do.
        recomputes: whether the author's forward checkpoints by itself, and so would update its norms twice.
        kept_bottlenecks: the positions of the layers whose bottlenecks the shared engine saves, as a budget decides.
    """

    engine: Engine | None = None
    exactly_once_norms: tuple[str, ...] | None = None
    pattern: ConnectionPattern | None = None
    whole_layers: ConnectionPattern | None = None
    sample: Sample | None = None
    saved: tuple[int, int] = (0, 0)
    reason: str | None = None
    recomputes: bool = False
    kept_bottlenecks: frozenset[int] | None = None

    def fingerprint(self, block: nn.Module) -> Fingerprint:
        """The present state of `block`. The constant of an activation that a layer calls by a function may come from
        any module's settings."""
        places = [place for calls in (self.pattern.calls if self.pattern else ()) for place in calls.activations]
        has_constants = any(isinstance(each, ActivationSpec) and (each.a or each.b) for each in places)
        return fingerprint(block, has_constants)


def find_pattern(block: nn.Module, forward: Callable[[Tensor], Tensor], may_be_layer: bool) -> Conversion:
    """How `forward`, the author's, uses the layers of `block`, and why their parts do not describe it, if they do
    not."""
    by_parts, reason = [], Code([*block.modules()]).by_parts
    try:
        found = patterns_by_parts(block, may_be_layer)
        by_parts = found if reason is None else []
    except NoPartsError as failure:
        reason = str(failure)
    by_calls = patterns_by_calls(block, looks_dense(block), may_be_layer)
    if reason is not None and not by_calls:
        raise NoPartsError(reason)
    parametrized = next(filter(None, map(why_not_parametrized, block.modules())), None)
    if parametrized is not None:  # no engine runs by parts there
        return find_by_trace(block, forward, [*by_calls, *by_parts], reason or parametrized)
    return find_by_trace(block, forward, [*by_parts, *by_calls], reason)


def find_by_trace(
    block: nn.Module,
    forward: Callable[[Tensor], Tensor],
    patterns: Sequence[ConnectionPattern],
    reason: str | None,
    tried: Sequence[Sample] = (),
) -> Conversion:
    """The pattern by which `forward`, the author's, uses the layers of `block`, of those given. The trace's input is
    the first of `tried`, by default of all samples that fit the modules, on which `forward` runs.

    Norms are under the exactly-once rule in the trace, so that a library's checkpointing, which updates them twice,
    does not count as a difference.
    """
    before = tuple(name for name, module in block.named_modules() if isinstance(module, UpdatesOnce))
    first_failure = None
    try:
        update_norms_once(block)
        for sample in tried or samples(block, channels_read(block)):
            with tracing(block, sample) as run:
                try:
                    imported, first = len(sys.modules), run.run(forward, MODES[0])
                    if len(sys.modules) > imported:  # such as PyTorch's compiler, which runs operations when imported
                        first = run.run(forward, MODES[0])
                    channels = run.table.shapes[first.output][1] if isinstance(first.output, Expression) else 0
                    if not looks_dense(block) and channels <= sample.channels:
                        raise VerificationError("returns no more channels than it takes")
                    traces = [first, *(run.run(forward, mode) for mode in MODES[1:])]
                except NotRunError as failure:
                    first_failure = first_failure or failure
                    continue
                patterns, reason = _with_calls(block, patterns, traces, reason)
                found = _match(block, forward, traces, run, patterns, reason)
                pattern, saved = cast(ConnectionPattern, found.pattern), run.saved_values_per_pixel(forward)
                recomputed = partial(run_pattern, block, forward, pattern, True)
                kept = run.saved_values_per_pixel(recomputed) if pattern.layer_call else 0
                return replace(found, sample=sample, saved=(saved, kept))
        raise cast(NotRunError, first_failure)
    finally:
        restore_norms(block, before)


def _with_calls(
    block: nn.Module,
    patterns: Sequence[ConnectionPattern],
    traces: Sequence[Trace],
    reason: str | None,
) -> tuple[Sequence[ConnectionPattern], str | None]:
    """The patterns with what the block's forward has called, without those of other layers than dense layers, and
    without those that call layers otherwise than it has, which their hooks would see; and `reason`, or the reason why
    there are no dense layers."""
    runs = [each.calls for each in traces if each.calls is not None]
    by_calls, by_parts, failures = [each for each in patterns if _calls_alike(block, each, traces[0])], [], []
    for pattern in patterns:
        try:
            by_parts += [] if pattern.layer_call else [with_calls(block, pattern, runs)]
        except NoPartsError as failure:
            failures.append(str(failure))
    possible = [*by_calls, *by_parts] if patterns[0].layer_call else [*by_parts, *by_calls]
    return possible, reason if by_parts or not failures else reason or failures[0]


def _calls_alike(block: nn.Module, pattern: ConnectionPattern, trace: Trace) -> bool:
    """Whether `pattern` calls whole layers, and passes the features to the last one as the block's forward does."""
    call = pattern.layer_call
    if call is None or pattern.is_layer:
        return call is not None
    as_called = call.separately, call.as_list
    return trace.features.get(layers_in(block)[-1], as_called) == as_called


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
    patterns: Iterable[ConnectionPattern],
    reason: str | None,
) -> Conversion:
    """The pattern by which an engine reproduces the block's results; and why not by the parts of its layers, if so."""
    difference, recomputes = None, any(trace.recomputes for trace in traces)
    for pattern in patterns:
        by_parts = pattern.layer_call is None
        found = describe_difference(traces, run, partial(run_pattern, block, forward, pattern, True))
        if found is None:
            found_reason = None if by_parts else reason or f"found that by the parts of its layers it {difference}"
            return Conversion(pattern=pattern, reason=found_reason, recomputes=recomputes)
        if not by_parts:
            called = partial(run_pattern, block, forward, pattern, False)
            if describe_difference(traces, run, called) is None:
                raise SideEffectError(f"has layers that must not be recomputed: it {found}")
        difference = difference or found
    raise VerificationError(reason or difference)


def run_pattern(
    block: nn.Module, forward: Callable[[Tensor], Tensor], pattern: ConnectionPattern, recomputed: bool, x: Tensor
) -> Tensor:
    """The output of `block` by `pattern`. If `recomputed`, layers are recomputed for gradients, where engines would."""
    # In evaluation mode, parts compute the same again: there is no dropout, and no statistic to update.
    recomputed = recomputed and (block.training or pattern.layer_call is not None)
    recomputed = recomputed and torch.is_grad_enabled() and layerwise.why_not_recompute(block) is None
    if pattern == WHOLE:
        return checkpoint_call(forward, (x,), {}) if recomputed else forward(x)
    run_first_half = layerwise.run_first_half_checkpoint if recomputed else layerwise.run_first_half_plain
    if pattern.layer_call is None:
        return run_layers(read_block(block, pattern), x, run_first_half)
    return run_whole_layers(block, forward, pattern, x, run_first_half)


def restore_norms(block: nn.Module, exactly_once: tuple[str, ...]) -> None:
    """Give the norms in `block` their classes back, except those named in `exactly_once`."""
    for name, module in block.named_modules():
        if isinstance(module, UpdatesOnce) and name not in exactly_once:
            undo_update_once(module)
