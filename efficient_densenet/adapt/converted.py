"""Converted dense blocks, and sequences with converted blocks: mixins for the classes of other libraries' modules."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .._mixins import ModuleMixin, add_mixin, remove_mixin
from ..checkpoint.call import checkpoint_call
from ..checkpoint.hooks import undo_fire_once
from ..engines import dispatch, plain, recompute
from ..engines.dispatch import Engine
from ..engines.eligibility import must_be_called
from ..engines.parts import BlockParts, NoPartsError, is_norm
from ..engines.plain import RunFirstHalf
from ..engines.sequence import run_sequence
from ..norms.batch_norm import UpdatesOnce, UsesTorchForward, undo_update_once
from .layers import run_layers, skips_a_hook
from .structure import read_block
from .verify import matching_channel_order, trial

if TYPE_CHECKING:
    _SequentialMixin = nn.Sequential
else:
    _SequentialMixin = object


@dataclass
class Conversion:
    """The state of a converted block. It refers to no modules, so a copy or replica never refers to the original's."""

    engine: Engine | None
    newest_first: bool
    exactly_once_norms: tuple[str, ...]  # the names of norms that were under the exactly-once rule before


class ConvertedBlock(ModuleMixin):
    """Mixin: a dense block that an engine runs wherever its own forward would save much memory for backward."""

    _conversion: Conversion
    can_join_stage = True

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        # Compilers see the author's forward, and so do tracers, which may pass a proxy in the place of a tensor.
        if args or kwargs or not isinstance(x, Tensor) or torch.compiler.is_compiling():
            return super().forward(x, *args, **kwargs)
        plan = dispatch.plan_block(self, x)
        if plan.engine is Engine.PLAIN:
            return super().forward(x)
        return dispatch.run_block(self, x, plan)

    @property
    def engine(self) -> Engine | None:
        return self._conversion.engine

    def dense_parts(self) -> BlockParts:
        parts = read_block(self, self._conversion.newest_first)
        layers = [layer.module for layer in parts.layers]
        for child in self.children():
            if child not in layers and must_be_called(child):
                raise NoPartsError(f"found a hook on, or a new forward of, a {type(child).__name__} around the layers")
        return parts

    def run_layers(self, x: Tensor, run_first_half: RunFirstHalf) -> Tensor:
        """Run the block layer by layer; if that would skip a module with a hook, recompute the author's forward."""
        try:
            parts = self.dense_parts()
        except NoPartsError:
            parts = None
        if parts is not None and not skips_a_hook(parts):
            return run_layers(parts, x, run_first_half)
        if run_first_half is recompute.run_first_half_official:
            return cast(Tensor, torch_checkpoint(super().forward, x, use_reentrant=False))
        if run_first_half is plain.run_first_half:
            return super().forward(x)
        return checkpoint_call(super().forward, (x,), {})

    def __prepare_scriptable__(self) -> nn.Module:  # torch.jit.script calls it before anything else
        raise NotImplementedError("torch.jit.script cannot compile a converted dense block: restore(model) first")


class ConvertedSequence(_SequentialMixin):
    """Mixin: an nn.Sequential that runs a converted block together with the module that consumes its output, and the
    modules before the first one as a stem, where the shared engine can."""

    def forward(self, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (named `input` there)
        return run_sequence(list(self._modules.items()), x, _is_converted)[0]


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, ConvertedBlock)


def convert_block(block: nn.Module, engine: Engine | None) -> None:
    """Let `engine` run `block`, and put its batch norms under the exactly-once rule, in place.

    If `block` is not a dense block, raise `NoPartsError` or `VerificationError` and leave it unchanged.
    """
    read_block(block)
    exactly_once = tuple(name for name, module in block.named_modules() if isinstance(module, UpdatesOnce))
    try:
        newest_first = _verify_block(block)
    except Exception:
        _restore_norms(block, exactly_once)
        raise
    add_mixin(block, ConvertedBlock)
    cast(ConvertedBlock, block)._conversion = Conversion(engine, newest_first, exactly_once)


def _verify_block(block: nn.Module) -> bool:
    """Verify by a trial that `block` computes what its parts say; return whether it puts the newest features first.

    Torch's norms are put under the exactly-once rule before the trial, so that a library's checkpointing, which updates
    them twice, does not count as a difference. Norms with a forward of their own run it in the trial of the block's own
    forward, and torch's forward from then on.
    """
    custom_norms = [module for module in block.modules() if isinstance(module, _BATCH_NORMS) and not is_norm(module)]
    for module in block.modules():
        if isinstance(module, _NormBase) and not isinstance(module, UpdatesOnce) and module not in custom_norms:
            add_mixin(module, UpdatesOnce, innermost=True)  # update_once would change the name of the class
    with trial(block) as run:
        block_results = run(block.forward)
        for module in custom_norms:
            add_mixin(module, UsesTorchForward, innermost=True)
        return matching_channel_order(block_results, run, partial(read_block, block))


def restore_block(block: ConvertedBlock) -> None:
    """Undo `convert_block`."""
    remove_mixin(block, ConvertedBlock)
    for module in block.modules():
        undo_fire_once(module)
    _restore_norms(block, block._conversion.exactly_once_norms)
    del block._conversion


def _restore_norms(block: nn.Module, exactly_once: tuple[str, ...]) -> None:
    """Give the norms in `block` their classes back, except those named in `exactly_once`."""
    for name, module in block.named_modules():
        if isinstance(module, UsesTorchForward):
            remove_mixin(module, UsesTorchForward)
        elif isinstance(module, UpdatesOnce) and name not in exactly_once:
            undo_update_once(module)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
