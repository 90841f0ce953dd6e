"""Converted dense blocks: a mixin for the classes of other libraries' modules, and the trial that finds its pattern."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .._mixins import ModuleMixin, add_mixin, base_class, remove_mixin
from .._torch_private import constant_to_compilers, may_read_converted_modules
from ..checkpoint.call import checkpoint_call
from ..checkpoint.hooks import undo_fire_once
from ..engines import dispatch, plain, recompute
from ..engines.dispatch import Engine
from ..engines.eligibility import must_be_called, why_replaced
from ..engines.parts import BlockParts, NoPartsError, is_norm
from ..engines.plain import RunFirstHalf
from ..norms.batch_norm import UpdatesOnce, UsesTorchForward, undo_update_once
from .connection_pattern import ConnectionPattern
from .fingerprint import Fingerprint, change_since, fingerprint, holds_attributes, plain_attributes
from .layers import run_layers, run_whole_layers, skips_a_hook
from .structure import in_channels_of, layers_in, patterns_by_calls, patterns_by_parts, read_block
from .verify import Results, Run, VerificationError, describe_difference, trial


class KeepsSignature(ModuleMixin):
    """Base of mixins whose classes show the signature of the author's forward to whoever inspects it, as tracers do."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if base_class(cls) is not cls:  # a class with mixins, not the mixin itself
            cls.forward = _with_signature_of(base_class(cls).forward, cls.forward)


def _with_signature_of(original: Callable, forward: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return wrapper


@dataclass
class Conversion:
    """The state of a converted block. It refers to no modules, so a copy or replica never refers to the original's.

    Attributes:
        engine: the requested one.
        exactly_once_norms: the names of norms that were under the exactly-once rule before; None for all of them.
        pattern: how the block's forward uses its layers; None where a trial did not find out.
        reason: why the parts of its layers do not describe the block, or None where they do.
        verified: the block's state at the last trial; None before the first one.
    """

    engine: Engine | None = None
    exactly_once_norms: tuple[str, ...] | None = None
    pattern: ConnectionPattern | None = None
    reason: str | None = None
    verified: Fingerprint | None = None

    def __getstate__(self) -> dict[str, Any]:
        verified = None if self.verified is None else self.verified.without_identities()
        return vars(self) | {"verified": verified}


class ConvertedBlock(KeepsSignature):
    """Mixin: a dense block that an engine runs wherever its own forward would save much memory for backward."""

    _conversion = Conversion()  # of a module that nn.Sequential made of some layers of a converted one
    can_join_stage = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Tracers see the author's forward; they may pass a proxy in the place of a tensor.
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return super().forward(*args, **kwargs)
        plan = None if self._conversion.verified is None else dispatch.plan_block(self, args[0])
        if plan is None or plan.engine is Engine.PLAIN:
            return super().forward(*args)
        return dispatch.run_block(self, args[0], plan)

    @property
    def engine(self) -> Engine | None:
        return self._conversion.engine if may_read_converted_modules() else Engine.PLAIN

    def set_engine(self, engine: Engine | None) -> None:
        self._conversion = replace(self._conversion, engine=engine)

    def _verify_again(self) -> None:
        """Find out by a trial how the block uses its layers, unless its state is that of the last trial.

        This is for `make_efficient` alone. A forward compares states, and never runs a trial: other threads, processes
        or a checkpoint around it would see the trial's parameters and operations.
        """
        if self._state_change() is None and self._conversion.pattern is not None:
            return
        pattern = None
        try:
            pattern, reason = _find_pattern(self, super().forward, may_be_layer=True)
        except (NoPartsError, VerificationError) as failure:
            reason = f"found another block than was converted: {failure}"
        self._conversion = replace(self._conversion, pattern=pattern, reason=reason, verified=fingerprint(self))

    def _state_change(self) -> str | None:
        """What has changed since the last trial, or None."""
        if torch.compiler.is_compiling():
            holds_attributes(self, self._plain_attributes())  # for the compiler to guard
        return self._state_change_now()

    @constant_to_compilers
    def _plain_attributes(self) -> Any:
        return plain_attributes(self)

    @constant_to_compilers
    def _state_change_now(self) -> str | None:
        before = self._conversion.verified
        change = "its layers are others" if before is None else change_since(before, self)
        if change is None and before is not None and not before.classes:  # a copy: from now on, with identities
            self._conversion = replace(self._conversion, verified=fingerprint(self))
        return change

    def dense_parts(self) -> BlockParts:
        change = self._state_change()
        if change is not None:
            replaced = next(filter(None, map(why_replaced, [*self.modules()][1:])), None)
            raise NoPartsError(
                replaced or f"found that {change} since it was verified: call make_efficient again, which verifies it"
            )
        if self._conversion.reason is not None or self._conversion.pattern is None:
            raise NoPartsError(self._conversion.reason)
        parts = read_block(self, self._conversion.pattern)
        layers = [layer.module for layer in parts.layers]
        for child in self.children():
            if child not in layers and must_be_called(child) and self not in layers:
                raise NoPartsError(f"found a hook on, or a new forward of, a {type(child).__name__} around the layers")
        return parts

    def run_layers(self, x: Tensor, run_first_half: RunFirstHalf) -> Tensor:
        """Run the block layer by layer; if that would skip a module with a hook, recompute the author's forward."""
        pattern = self._conversion.pattern if self._state_change() is None else None
        by_layers = _run_by_layers(self, super().forward, pattern)
        if by_layers is not None:
            return by_layers(x, run_first_half)
        if run_first_half is recompute.run_first_half_official:
            return cast(Tensor, torch_checkpoint(super().forward, x, use_reentrant=False))
        if run_first_half is plain.run_first_half:
            return super().forward(x)
        return checkpoint_call(super().forward, (x,), {})

    def __prepare_scriptable__(self) -> nn.Module:  # torch.jit.script calls it before anything else
        raise NotImplementedError("torch.jit.script cannot compile a converted dense block: restore(model) first")


def _run_by_layers(
    block: ConvertedBlock, forward: Callable, pattern: ConnectionPattern | None
) -> Callable[[Tensor, RunFirstHalf], Tensor] | None:
    """The function that runs `block` layer by layer, or None where that would skip a module that must be called."""
    if pattern is None:
        return None
    if pattern.layer_call is not None:
        inside = () if pattern.is_layer else set(block.children()) - set(layers_in(block))
        return None if any(map(must_be_called, inside)) else partial(run_whole_layers, block, forward, pattern)
    try:
        parts = block.dense_parts()
    except NoPartsError:
        return None
    return None if skips_a_hook(parts) else partial(run_layers, parts)


def convert_block(block: nn.Module, engine: Engine | None, may_be_layer: bool = False) -> None:
    """Let `engine` run `block`, and put its batch norms under the exactly-once rule, in place.

    With `may_be_layer`, a module of any kind is tried as a layer that concatenates its input and its output.
    If `block` is not a dense block, raise `NoPartsError` or `VerificationError` and leave it unchanged.
    """
    clash = next((name for name in _NAMES_OF_CONVERTED_BLOCKS if hasattr(block, name)), None)
    if clash is not None:
        raise NoPartsError(f"found {clash} in a {type(block).__name__}, a name that converted blocks need themselves")
    exactly_once = tuple(name for name, module in block.named_modules() if isinstance(module, UpdatesOnce))
    try:
        pattern, reason = _find_pattern(block, block.forward, may_be_layer)
    except Exception:
        _restore_norms(block, exactly_once)
        raise
    add_mixin(block, ConvertedBlock)
    cast(ConvertedBlock, block)._conversion = Conversion(engine, exactly_once, pattern, reason, fingerprint(block))


def _find_pattern(
    block: nn.Module, forward: Callable[[Tensor], Tensor], may_be_layer: bool
) -> tuple[ConnectionPattern, str | None]:
    """How `forward`, the author's, uses the layers of `block`, and why their parts do not describe it, if so.

    Torch's norms are put under the exactly-once rule before the trial, so that a library's checkpointing, which updates
    them twice, does not count as a difference. Norms with a forward of their own run it in the trial of the block's own
    forward, and torch's forward from then on.
    """
    reason, by_parts = None, []
    try:
        by_parts = patterns_by_parts(block)
    except NoPartsError as failure:
        reason = str(failure)
    by_calls = patterns_by_calls(block, may_be_layer)
    if reason is not None and not by_calls:
        raise NoPartsError(reason)
    custom_norms = [module for module in block.modules() if isinstance(module, _BATCH_NORMS) and not is_norm(module)]
    for module in custom_norms:
        own = vars(module).keys() - _OF_EVERY_BATCH_NORM
        if own:
            raise VerificationError(
                f"holds a {type(module).__name__} with attributes of its own: {', '.join(sorted(own))}"
            )
    for module in block.modules():
        if isinstance(module, _NormBase) and not isinstance(module, UpdatesOnce) and module not in custom_norms:
            add_mixin(module, UpdatesOnce, innermost=True)  # update_once would change the name of the class
    with trial(block, in_channels_of(block)) as run:
        block_results = run(forward)
        for module in custom_norms:
            add_mixin(module, UsesTorchForward, innermost=True)
        return _match(partial(_run_pattern, block, forward), block_results, run, [*by_parts, *by_calls], reason)


def _match(
    forward: Callable[[ConnectionPattern, Tensor], Tensor],
    block_results: Results,
    run: Run,
    patterns: Iterable[ConnectionPattern],
    reason: str | None,
) -> tuple[ConnectionPattern, str | None]:
    """The pattern by which `forward` reproduces the block's results, and why the parts of its layers do not, if so."""
    difference = None
    for pattern in patterns:
        found = describe_difference(block_results, run, partial(forward, pattern))
        if found is None and pattern.layer_call is None:
            return pattern, None
        if found is None:
            return pattern, reason or f"found that by the parts of its layers it {difference}"
        difference = difference or found
    raise VerificationError(reason or difference)


def _run_pattern(
    block: nn.Module, forward: Callable[[Tensor], Tensor], pattern: ConnectionPattern, x: Tensor
) -> Tensor:
    if pattern.layer_call is None:
        return run_layers(read_block(block, pattern), x)
    return run_whole_layers(block, forward, pattern, x)


def restore_block(block: ConvertedBlock) -> None:
    """Undo `convert_block`."""
    exactly_once = block._conversion.exactly_once_norms
    remove_mixin(block, ConvertedBlock)
    for module in block.modules():
        undo_fire_once(module)
    if exactly_once is not None:
        _restore_norms(block, exactly_once)
    vars(block).pop("_conversion", None)


def _restore_norms(block: nn.Module, exactly_once: tuple[str, ...]) -> None:
    """Give the norms in `block` their classes back, except those named in `exactly_once`."""
    for name, module in block.named_modules():
        if isinstance(module, UsesTorchForward):
            remove_mixin(module, UsesTorchForward)
        elif isinstance(module, UpdatesOnce) and name not in exactly_once:
            undo_update_once(module)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NAMES_OF_CONVERTED_BLOCKS = "engine", "set_engine", "run_layers", "can_join_stage"
_OF_EVERY_BATCH_NORM = vars(nn.BatchNorm2d(1)).keys()
