"""Find out by a trial how a block's forward uses its layers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _LazyNormBase, _NormBase

from .._mixins import add_mixin, remove_mixin
from ..checkpoint.call import checkpoint_call
from ..engine import layerwise
from ..engine.changed_modules import why_not_parametrized
from ..engine.choose import Engine
from ..engine.parts import NoPartsError
from ..kernels.activations import ActivationSpec
from ..norms.batch_norm import UpdatesOnce, UsesTorchForward, undo_update_once
from .connection_pattern import ALONE, ConnectionPattern
from .fingerprint import Fingerprint, drop_rates, fingerprint, why_not_watched
from .layer_parts import Call
from .layers import run_layers, run_whole_layers
from .sample import IMAGES, Sample, dimensions, samples
from .structure import (
    channels_read,
    custom_norms_in,
    first_conv,
    last_conv,
    looks_dense,
    may_concatenate,
    may_return,
    patterns_by_calls,
    patterns_by_parts,
    read_block,
    with_calls,
)
from .trial import (
    MAIN_MODES,
    MODES,
    NotRunError,
    Result,
    SideEffectError,
    Trial,
    VerificationError,
    describe_modes,
    modes_of,
    trial,
)
from .verified import Verified
from .verify import Results, describe_difference


@dataclass
class Conversion(Verified):
    """The state of a converted block.

    Attributes:
        engine: the requested engine.
        exactly_once_norms: the names of norms that were under the exactly-once rule before; None for all of them.
        pattern: how the block's forward uses its layers; None if a trial did not find a pattern.
        whole_layers: how to call whole layers where the parts describe them too, if engines that recompute should.
        sample: the input of the trial, if there was one.
        pair: the channels of the first of the two tensors that a layer takes as one argument; 0 if it takes a tensor.
        reason: why the parts of the layers do not describe the block, or None if they do.
        statistics: the names of buffers that only batch norms of the author's own classes read: any values of them are
            verified.
        recomputes: whether the author's forward checkpoints by itself, and so would update its norms twice.
        kept_bottlenecks: the positions of the layers whose bottlenecks the shared engine saves, as a budget decides.
        as_a_whole: whether the author's forward may be recomputed as a whole, if running its layers would skip a hook.
    """

    engine: Engine | None = None
    exactly_once_norms: tuple[str, ...] | None = None
    pattern: ConnectionPattern | None = None
    whole_layers: ConnectionPattern | None = None
    sample: Sample | None = None
    pair: int = 0
    reason: str | None = None
    statistics: frozenset[str] = frozenset()
    recomputes: bool = False
    as_a_whole: bool = True
    kept_bottlenecks: frozenset[int] | None = None

    def fingerprint(self, block: nn.Module) -> Fingerprint:
        """The present state of `block`. The constant of an activation that a layer calls by a function may come from
        any module's settings."""
        places = [place for calls in (self.pattern.calls if self.pattern else ()) for place in calls.activations]
        has_constants = any(isinstance(each, ActivationSpec) and (each.a or each.b) for each in places)
        return fingerprint(block, self.statistics, has_constants)


def find_pattern(block: nn.Module, forward: Callable[[Tensor], Tensor], may_be_layer: bool) -> Conversion:
    """How `forward`, the author's, uses the layers of `block`, and why their parts do not describe it, if they do
    not."""
    if not (looks_dense(block) or may_concatenate(block)):
        raise NoPartsError("found no forward but those of torch, none of which concatenates")
    reason, by_parts, asked = None, [], modes_of(block)
    try:
        by_parts = patterns_by_parts(block)
    except NoPartsError as failure:
        reason = str(failure)
    if asked:
        reason = reason or f"found that it {describe_modes(asked)}"
    reason = reason or why_not_watched([*block.modules()])
    if reason is not None:
        by_parts = []
    by_calls = patterns_by_calls(block, may_be_layer)
    if reason is not None and not by_calls:
        raise NoPartsError(reason)
    parametrized = next(filter(None, map(why_not_parametrized, block.modules())), None)
    if parametrized is not None:  # no engine runs by parts there
        found = find_by_trial(block, forward, [*by_calls, *by_parts], reason or parametrized)
    else:
        found = find_by_trial(block, forward, [*by_parts, *by_calls], reason)
    if why_not_watched([block]) is not None and not cast(ConnectionPattern, found.pattern).is_layer:
        raise VerificationError(reason)  # its own forward must run
    return found


def find_by_trial(
    block: nn.Module,
    forward: Callable[[Tensor], Tensor],
    patterns: Sequence[ConnectionPattern],
    reason: str | None,
    tried: Sequence[Sample] = (),
) -> Conversion:
    """The pattern by which `forward`, the author's, uses the layers of `block`, of those given. The trial's input is
    the first of `tried`, by default of all samples that fit the modules, on which `forward` runs.

    Torch's norms are under the exactly-once rule in the trial, so that a library's checkpointing, which updates them
    twice, does not count as a difference. Norms with a forward of their own run this forward in the trial of the
    block's own forward, and torch's forward afterwards.
    """
    custom_norms = custom_norms_in(block)
    for module in custom_norms:
        _check_has_torch_state(module)
    before = tuple(name for name, module in block.named_modules() if isinstance(module, UpdatesOnce))
    found = first_failure = None
    try:
        update_norms_once(block)
        for sample in tried or samples(block, channels_read(block)):
            with trial(block, sample) as run:
                try:
                    first = run.run_once(forward, MODES[0])
                    patterns = _of_width(block, patterns, sample, first)
                    block_results = [first, *run.run(forward, MODES[1:])]
                except NotRunError as failure:
                    first_failure = first_failure or failure
                    continue
                by_names = partial(run.finds_modules_by_their_names, forward)
                patterns, reason = _with_calls(block, patterns, block_results, by_names, reason)
                for module in custom_norms:
                    add_mixin(module, UsesTorchForward, innermost=True)
                found = _match(block, forward, block_results, run, patterns, reason)
                found = replace(found, sample=sample, statistics=_statistics(block_results))
                return found
        raise cast(NotRunError, first_failure)
    finally:
        restore_norms(block, before, keep_torch_forward=found is not None)


def find_pair(layer: nn.Module, forward: Callable, reason: str) -> Conversion:
    """A pattern for a layer that takes two tensors of one size as one argument, as many channels as its first
    convolution reads and its last one writes, and is recomputed where it is called."""
    first, second = first_conv(layer).in_channels, last_conv(layer).out_channels
    found = find_by_trial(layer, of_one_tensor(forward, first), [ALONE], reason, [Sample(first + second)])
    return replace(found, pair=first)


def of_one_tensor(forward: Callable, pair: int = 0) -> Callable[[Tensor], Tensor]:
    """A forward of one tensor that returns one, for a trial: several outputs are concatenated, and where `forward`
    takes two tensors, they are the first `pair` channels and the others."""

    def concatenated(x: Tensor) -> Tensor:
        output = forward((x[:, :pair], x[:, pair:]) if pair else x)
        return torch.cat(output, 1) if isinstance(output, (tuple, list)) else output

    return concatenated


def _with_calls(
    block: nn.Module,
    patterns: Sequence[ConnectionPattern],
    block_results: Results,
    by_names: Callable[[Sequence[Call]], bool],
    reason: str | None,
) -> tuple[Sequence[ConnectionPattern], str | None]:
    """The patterns with what the block's forward has called, without those of other layers than dense layers; and
    `reason`, or the reason why there are no dense layers. `by_names` says whether modules are found by their names."""
    runs = [each.calls for each in block_results if each.calls is not None]
    by_calls, by_parts, failures = [each for each in patterns if each.layer_call], [], []
    for pattern in patterns:
        try:
            by_parts += [] if pattern.layer_call else [with_calls(block, pattern, runs)]
        except NoPartsError as failure:
            failures.append(str(failure))
    if any(pattern.calls for pattern in by_parts) and not by_names(runs[0]):
        by_parts, failures = [], ["found modules that a layer does not find by their names"]
    possible = [*by_calls, *by_parts] if patterns[0].layer_call else [*by_parts, *by_calls]
    return possible, reason if by_parts or not failures else reason or failures[0]


def _statistics(block_results: Results) -> frozenset[str]:
    """The names of the buffers of authors' modules that batch norms alone have read: running statistics."""
    normalized, read = ([each.normalized for each in block_results], [each.read for each in block_results])
    return frozenset[str]().union(*normalized).difference(*read)


def _of_width(
    block: nn.Module, patterns: Sequence[ConnectionPattern], sample: Sample, result: Result
) -> Sequence[ConnectionPattern]:
    """The patterns by which a block may return what it has returned. Without any, this raises `VerificationError` for a
    module that does not look dense; the trial of another one finds out what to say."""
    _, channels, *size = result.values[0].shape
    same_size = size == [*sample.shape(IMAGES, dimensions(block))[2:]]
    fitting = [
        each for each in patterns if each == ALONE or (same_size and may_return(block, each, sample.channels, channels))
    ]
    if not (fitting or looks_dense(block)):
        raise VerificationError(f"returns {channels} channels for {sample.channels}")
    return fitting or patterns[:1]


def _check_has_torch_state(norm: nn.Module) -> None:
    """Raise `VerificationError` for a norm with a forward of its own that may read attributes torch's norms do not
    have, or values that are not watched."""
    tensors = norm._parameters.keys() | norm._buffers.keys() | norm._modules.keys()
    own = (vars(norm).keys() | tensors) - _OF_EVERY_BATCH_NORM
    if own:
        raise VerificationError(f"holds a {type(norm).__name__} with attributes of its own: {', '.join(sorted(own))}")
    unwatched = why_not_watched([norm])
    if unwatched is not None:
        raise VerificationError(unwatched)


def update_norms_once(block: nn.Module) -> None:
    """Put the norms in `block` under the exactly-once rule. (`update_once` would change the names of their classes.)"""
    for module in block.modules():
        is_torch_s = isinstance(module, _NormBase) and not isinstance(module, (UpdatesOnce, _LazyNormBase))
        if is_torch_s and not custom_norms_in(module):
            add_mixin(module, UpdatesOnce, innermost=True)


def _match(
    block: nn.Module,
    forward: Callable[[Tensor], Tensor],
    block_results: Results,
    run: Trial,
    patterns: Iterable[ConnectionPattern],
    reason: str | None,
) -> Conversion:
    """The pattern by which an engine reproduces the block's results; and why not by the parts of its layers, if so."""
    difference, recomputes = None, any(result.recomputes for result in block_results)
    for pattern in patterns:
        by_parts = pattern.layer_call is None
        found = describe_difference(block_results, run, partial(run_pattern, block, forward, pattern, True))
        if found is None:
            found_reason = None if by_parts else reason or f"found that by the parts of its layers it {difference}"
            trained = [result for result in block_results if result.mode is MAIN_MODES[1]]
            as_a_whole = describe_difference(trained, run, partial(_recompute_whole, block, forward)) is None
            return Conversion(pattern=pattern, reason=found_reason, recomputes=recomputes, as_a_whole=as_a_whole)
        if not by_parts:
            called = partial(run_pattern, block, forward, pattern, False)
            if describe_difference(block_results, run, called) is None:
                raise SideEffectError(f"has layers that must not be recomputed: it {found}")
        difference = difference or f"{found}{_about_dropout(block, found)}"
    raise VerificationError(reason or difference)


def _about_dropout(block: nn.Module, difference: str) -> str:
    """What to say after a difference that evaluation mode, in which there is no dropout, does not have."""
    if "training mode" not in difference or not any(drop_rates(module) for module in block.modules()):
        return ""
    return ", perhaps because its dropout is not after the last convolution of each layer"


def run_pattern(
    block: nn.Module, forward: Callable[[Tensor], Tensor], pattern: ConnectionPattern, recomputed: bool, x: Tensor
) -> Tensor:
    """The output of `block` by `pattern`. If `recomputed`, layers are recomputed for gradients, where engines would."""
    recomputed = recomputed and torch.is_grad_enabled() and layerwise.why_not_recompute(block) is None
    run_first_half = layerwise.run_first_half_checkpoint if recomputed else layerwise.run_first_half_plain
    if pattern.layer_call is None:
        return run_layers(read_block(block, pattern), x, run_first_half)
    return run_whole_layers(block, forward, pattern, x, run_first_half)


def _recompute_whole(block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The output of `forward`, the author's, recomputed where engines would."""
    return forward(x) if layerwise.why_not_recompute(block) is not None else checkpoint_call(forward, (x,), {})


def restore_norms(block: nn.Module, exactly_once: tuple[str, ...], keep_torch_forward: bool = False) -> None:
    """Give the norms in `block` their classes back, except those named in `exactly_once`."""
    for name, module in block.named_modules():
        if isinstance(module, UsesTorchForward):
            if not keep_torch_forward:
                remove_mixin(module, UsesTorchForward)
        elif isinstance(module, UpdatesOnce) and name not in exactly_once:
            undo_update_once(module)


_OF_EVERY_BATCH_NORM = {
    *vars(nn.BatchNorm2d(1)),
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "num_batches_tracked",
}
