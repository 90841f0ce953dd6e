"""Find out by a trace how a module's forward uses the modules inside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

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
from .guard import Guard, guard_of, settings_of
from .layers import run_layers
from .read import Parts, Transition, block_parts, check_output, read_parts, read_transition, run_transition
from .recipes import WHOLE, Recipe, read_recipe, run_recipe
from .structure import channels_read, looks_dense
from .trace import Trace, Tracer, describe_difference, samples, tracing
from .verified import Verified

Pattern = Parts | Transition | Recipe


@dataclass
class Conversion(Verified):
    """The state of a converted module.

    Attributes:
        engine: the requested engine.
        exactly_once_norms: the names of norms that were under the exactly-once rule before; None for all of them.
        pattern: how the author's forward uses the modules inside; None if a trace did not find out.
        reason: why the parts of the layers do not describe a block, or None if they do.
        recomputes: whether the author's forward checkpoints by itself, and so would update its norms twice.
        kept_bottlenecks: the positions of the layers whose bottlenecks the shared engine saves, as a budget decides.
    """

    engine: Engine | None = None
    exactly_once_norms: tuple[str, ...] | None = None
    pattern: Pattern | None = None
    reason: str | None = None
    recomputes: bool = False
    kept_bottlenecks: frozenset[int] | None = None


def find(
    module: nn.Module,
    forward: Callable[[Tensor], Tensor],
    kinds: Sequence[type | Recipe] = (Parts, Recipe),
    reason: str | None = None,
) -> Conversion:
    """How `forward`, the author's, uses the modules inside of `module`: the first of `kinds` that computes the same
    expressions. `reason` is why not by the parts of layers.

    Norms are under the exactly-once rule in the trace, so that a library's checkpointing, which updates them twice,
    does not count as a difference.
    """
    parametrized = next(filter(None, map(why_not_parametrized, module.modules())), None)
    if parametrized is not None and kinds == (Parts, Recipe):  # no engine runs by parts there
        kinds, reason = (Recipe, Parts), parametrized
    before = tuple(name for name, each in module.named_modules() if isinstance(each, UpdatesOnce))
    first_failure = None
    try:
        update_norms_once(module)
        for sample in samples(module, channels_read(module)):
            with tracing(module, sample) as run:
                try:
                    traces = list(run.runs_of_author(forward))
                except NotRunError as failure:
                    first_failure = first_failure or failure
                    continue
                return _match(module, forward, traces, run, kinds, reason)
        raise cast(NotRunError, first_failure)
    finally:
        restore_norms(module, before)


def _match(
    module: nn.Module,
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
            pattern = _read(module, traces, run, kind)
        except NoPartsError as failure:
            reason = reason or str(failure)
            continue
        found = describe_difference(traces, run, partial(run_pattern, module, forward, pattern, True))
        if found is None:
            reason = None if kind is Parts and reason is None else reason
            guard, recomputes = _guard(module, run, pattern), any(trace.recomputes for trace in traces)
            return Conversion(guard, pattern=pattern, reason=reason, recomputes=recomputes)
        if isinstance(pattern, Recipe):
            called = partial(run_pattern, module, forward, pattern, False)
            if describe_difference(traces, run, called) is None:
                raise SideEffectError(f"has layers that must not be recomputed: it {found}")
        difference = difference or found
        if kind is Parts:
            reason = f"found that by the parts of its layers it {found}"
    raise VerificationError(reason or difference)


def _read(module: nn.Module, traces: Sequence[Trace], run: Tracer, kind: type | Recipe) -> Pattern:
    """A pattern of this kind that the traces suggest."""
    if kind in (Parts, Transition) and run.guard.asks is not None:
        raise NoPartsError(f"found that it {run.guard.asks}")
    if kind is Transition:
        return read_transition(module, run.table, traces)
    first = traces[0]
    if not looks_dense(module):
        channels = run.table.shapes[first.output][1] if isinstance(first.output, Expression) else 0
        if channels <= run.sample.channels:
            raise VerificationError("returns no more channels than it takes")
    if isinstance(kind, type):
        is_parts = kind is Parts
        return read_parts(module, run.table, traces) if is_parts else read_recipe(module, run.table, traces[1])
    check_output(first.output) if not looks_dense(module) else None
    if not looks_dense(module) and first.input not in run.table.parts(first.output, 1):
        raise NoPartsError("found no concatenation of its input and new features")
    return kind


def _guard(module: nn.Module, run: Tracer, pattern: Pattern) -> Guard:
    """What `pattern` depends on: by parts too, rates of dropout that are none of the layers', and the settings of any
    module from which the constant of a function may come."""
    if isinstance(pattern, Recipe) or not pattern.units:
        return run.guard
    specs = (each.activation for each in pattern.units)
    has_constants = any(isinstance(each, ActivationSpec) and (each.a or each.b) for each in specs)
    settings = settings_of(module) if has_constants or isinstance(pattern, Transition) else ()
    live = [(module.get_submodule(each.module), each.attribute) for each in pattern.dropouts]
    return guard_of(module, run.ran.values(), run.guard.names.union(settings), live)


def update_norms_once(block: nn.Module) -> None:
    """Put the norms in `block` under the exactly-once rule. (`update_once` would change the names of their classes.)"""
    for module in block.modules():
        if isinstance(module, _NormBase) and not isinstance(module, (UpdatesOnce, _LazyNormBase)):
            add_mixin(module, UpdatesOnce, innermost=True)


def run_pattern(
    module: nn.Module, forward: Callable[[Tensor], Tensor], pattern: Pattern, recomputed: bool, x: Tensor
) -> Tensor:
    """The output of `module` by `pattern`. If `recomputed`, layers are recomputed for gradients, where engines would
    call an author's code again."""
    if isinstance(pattern, Transition):
        return run_transition(module, pattern, x)
    if isinstance(pattern, Parts):
        return run_layers(block_parts(module, pattern), x)
    recomputed = recomputed and torch.is_grad_enabled() and layerwise.why_not_recompute(module) is None
    if pattern == WHOLE:
        return checkpoint_call(forward, (x,), {}) if recomputed else forward(x)
    run: Any = layerwise.run_first_half_checkpoint if recomputed else layerwise.run_first_half_plain
    return run_recipe(module, pattern, x, run)


def restore_norms(block: nn.Module, exactly_once: tuple[str, ...]) -> None:
    """Give the norms in `block` their classes back, except those named in `exactly_once`."""
    for name, module in block.named_modules():
        if isinstance(module, UpdatesOnce) and name not in exactly_once:
            undo_update_once(module)
