"""Converted dense blocks: a mixin for the classes of other libraries' modules."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .._compilers import may_read_converted_modules
from .._mixins import add_mixin, remove_mixin
from .._torch_private import has_global_module_hooks
from ..checkpoint.call import checkpoint_call
from ..checkpoint.hooks import undo_fire_once
from ..engine import choose, layerwise
from ..engine.choose import Engine
from ..engine.layerwise import RunFirstHalf
from ..engine.limits import must_be_called
from ..engine.parts import BlockParts, NoPartsError
from ..engine.sharded import why_sharded
from ..norms.batch_norm import UpdatesOnce
from .find import Conversion, find, restore_norms, update_norms_once
from .layers import run_layers, skips_a_hook, unshared
from .read import Parts, block_parts, submodule
from .recipes import WHOLE, Recipe, run_recipe, unchanged
from .structure import looks_dense, may_be_called, why_not_traced
from .verified import VerifiedModule


class ConvertedBlock(VerifiedModule):
    """Mixin: a dense block that an engine runs where its own forward would save large tensors for backward."""

    _conversion = Conversion()  # default, for a slice of a converted nn.Sequential
    can_join_stage = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Tracers, which may pass a proxy instead of a tensor, trace the author's forward.
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            self._see_tracer(*args)
            return super().forward(*args, **kwargs)
        is_left = self._conversion.verified is None or self.reads_class_of(args[0])
        plan = None if is_left else choose.plan_block(self, args[0])
        if plan is None or plan.engine is Engine.PLAIN:
            return super().forward(*args)
        return choose.run_block(self, args[0], plan)

    @property
    def engine(self) -> Engine | None:
        return self._conversion.engine if may_read_converted_modules() else Engine.PLAIN

    def keep_bottlenecks(self, layers: Collection[int]) -> None:
        self._conversion = replace(self._conversion, kept_bottlenecks=frozenset(layers))

    def update_norms_once(self, engine: Engine) -> None:
        """Put the norms inside under the exactly-once rule where `engine` or the author's forward recomputes them. The
        shared engine does not need it, and so keeps torch's classes, which tools such as quantization look for."""
        if engine in (Engine.CHECKPOINT, Engine.OFFICIAL) or self._conversion.recomputes:
            update_norms_once(self)
        elif self._conversion.exactly_once_norms is not None:
            restore_norms(self, self._conversion.exactly_once_norms)

    def why_not_recompute(self) -> str | None:
        """Why no engine may run the block, or None: the forward of an unverified block may have side effects that must
        not be repeated."""
        change = self._state_change()
        if change is None:
            return None
        again = f"found that {change} since it was verified: call make_efficient again, which verifies it"
        return next(filter(None, map(why_sharded, [*self.modules()][1:])), again)

    def dense_parts(self) -> BlockParts:
        pattern, reason = self._conversion.pattern, self.why_not_recompute() or self._conversion.reason
        if reason is not None or not isinstance(pattern, Parts):
            raise NoPartsError(reason)
        parts = block_parts(self, pattern)
        kept = self._conversion.kept_bottlenecks
        if kept is not None:
            layers = [replace(layer, keep_bottleneck=i in kept) for i, layer in enumerate(parts.layers)]
            parts = replace(parts, layers=tuple(layers))
        inside = {module for layer in parts.layers for module in layer.module.modules()}
        for module in {*self.modules()} - inside - {self}:
            if must_be_called(module):
                raise NoPartsError(f"found a hook on, or a new forward of, a {type(module).__name__} around the layers")
        return parts

    def run_layers(self, x: Tensor, run_first_half: RunFirstHalf) -> Tensor:
        """Run the block layer by layer; if that would skip a module with a hook, by the author's forward."""
        recomputes = run_first_half is not layerwise.run_first_half_plain
        if recomputes and not torch.compiler.is_compiling():  # a compiler recomputes without side effects
            update_norms_once(self)
        by_layers = _run_by_layers(self)
        if by_layers is not None:
            return by_layers(x, run_first_half)
        if not recomputes:
            return super().forward(x)
        x, forward = unshared(x, run_first_half), unchanged(self, super().forward, self._conversion.verified)
        if run_first_half is layerwise.run_first_half_official:
            return cast(Tensor, torch_checkpoint(forward, x, use_reentrant=False))
        return checkpoint_call(forward, (x,), {})

    def _see_tracer(self, *args: Any) -> None:
        """Warn that a tracer of torch.fx makes a graph of the author's forward. FX quantization does not find norms
        under the exactly-once rule in it, since it looks for modules of exactly torch's classes."""
        if any(isinstance(each, Proxy) for each in args):
            choose.warn_once(
                f"torch.fx traces into a {type(self).__name__}, a converted dense block: its graph runs the author's "
                f"layers and saves no memory. Keep such blocks as leaf modules, as by create_feature_extractor(..., "
                "tracer_kwargs={'leaf_modules': [" + type(self).__name__ + "]}), or call restore(model) first, as to "
                "quantize the model"
            )

    def __prepare_scriptable__(self) -> nn.Module:  # torch.jit.script calls this first
        raise NotImplementedError("torch.jit.script cannot compile a converted dense block: restore(model) first")


def _run_by_layers(block: ConvertedBlock) -> Callable[[Tensor, RunFirstHalf], Tensor] | None:
    """The function that runs `block` layer by layer, or None if it would skip a module that must be called: one with a
    hook, and any module where there is a hook on all modules."""
    pattern = block._conversion.pattern
    if pattern in (None, WHOLE) or has_global_module_hooks():
        return None
    if isinstance(pattern, Recipe):
        called = {module for call in pattern.calls for module in submodule(block, call.name).modules()}
        inside = {*block.modules()} - called - {block}
        run = partial(run_recipe, block, pattern, guard=block._conversion.verified)
        return None if any(map(must_be_called, inside)) else run
    try:
        parts = block.dense_parts()
    except NoPartsError:
        return None
    return None if skips_a_hook(parts) else partial(run_layers, parts)


def convert_block(block: nn.Module, engine: Engine | None, why_whole: str | None = None) -> None:
    """Let `engine` run `block`, in place: as a whole if there is a reason why it is not converted otherwise.

    If `block` is not a dense block, raise `NoPartsError` or `VerificationError` and leave it unchanged.
    """
    if why_whole is not None:
        kinds: Sequence[type | Recipe] = (WHOLE,)
    else:
        kinds = (Parts, Recipe) if looks_dense(block) else (Parts, Recipe, WHOLE)  # a layer that concatenates
    if not may_be_called(block):
        kinds = [each for each in kinds if each is Parts]
    if not kinds:
        raise NoPartsError(why_whole)
    clash = next((name for name in _NAMES_OF_CONVERTED_BLOCKS if hasattr(block, name)), None)
    if clash is not None:
        raise NoPartsError(f"found {clash} in a {type(block).__name__}, a name that converted blocks need themselves")
    reason = why_not_traced(block)
    if reason is not None:
        raise NoPartsError(reason)
    exactly_once = tuple(name for name, module in block.named_modules() if isinstance(module, UpdatesOnce))
    conversion = find(block, block.forward, kinds, why_whole)
    add_mixin(block, ConvertedBlock)
    cast(ConvertedBlock, block)._conversion = replace(conversion, engine=engine, exactly_once_norms=exactly_once)


def restore_block(block: ConvertedBlock) -> None:
    """Undo `convert_block`."""
    exactly_once = block._conversion.exactly_once_norms
    remove_mixin(block, ConvertedBlock)
    for module in block.modules():
        undo_fire_once(module)
    if exactly_once is not None:
        restore_norms(block, exactly_once)
    vars(block).pop("_conversion", None)


_NAMES_OF_CONVERTED_BLOCKS = tuple(
    name for name in vars(ConvertedBlock) if not name.startswith("_") and name != "forward"
)
