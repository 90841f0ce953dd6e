"""What is put before the classes of other people's modules."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .._mixins import add_mixin, remove_mixin
from ..checkpoint.call import run_twice
from ..checkpoint.hooks import fire_always
from ..engines import dispatch as engines
from ..engines import plain, recompute
from ..engines.dispatch import Engine
from ..engines.eligibility import must_be_called
from ..engines.parts import BlockParts, NoPartsError, is_norm
from ..engines.plain import RunFirstHalf
from ..engines.sequence import run_sequence
from ..norms.batch_norm import ComputesAsTorch, UpdatesOnce, update_always
from .layers import are_passed_by, run_layers
from .read import read_block
from .trial import order_of, trial


@dataclass
class Conversion:
    """What a converted block carries; no modules, so that copies and replicas have nothing of the original's."""

    engine: Engine | None
    newest_first: bool
    norms_under_the_rule: tuple[str, ...]  # before the conversion


class ConvertedBlock:
    """Mixin: a dense block whose layers an engine runs wherever plain would keep much for a backward."""

    _conversion: Conversion

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        # A compiler sees the author's code, as tracers do, which may also pass something that stands for a tensor.
        if args or kwargs or not isinstance(x, Tensor) or torch.compiler.is_compiling():
            return super().forward(x, *args, **kwargs)
        plan = engines.plan_block(self, x)
        if plan.engine is Engine.PLAIN:
            return super().forward(x)
        return engines.run_block(self, x, plan)

    can_join_stage = True

    @property
    def engine(self) -> Engine | None:
        return self._conversion.engine

    def dense_parts(self) -> BlockParts:
        parts = read_block(self, self._conversion.newest_first)
        layers = [layer.module for layer in parts.layers]
        for between in self.children():
            if between not in layers and must_be_called(between):
                raise NoPartsError(
                    f"found a hook on, or a new forward of, a {type(between).__name__} around the layers"
                )
        return parts

    def run_layers(self, x: Tensor, run_first_half: RunFirstHalf) -> Tensor:
        """Layer by layer; or, where this would pass by somebody's hooks, the author's forward made again as a whole."""
        try:
            parts = self.dense_parts()
        except NoPartsError:
            parts = None
        if parts is not None and not are_passed_by(parts):
            return run_layers(parts, x, run_first_half)
        if run_first_half is recompute.run_first_half_official:
            return torch_checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x) if run_first_half is plain.run_first_half else run_twice(super().forward, (x,), {})

    def __prepare_scriptable__(self) -> nn.Module:  # torch.jit.script asks for it first
        raise NotImplementedError("torch.jit.script cannot compile a converted dense block: restore(model) first")


class ConvertedSequence:
    """Mixin: an nn.Sequential in which a converted block runs together with what consumes it where it can, and what
    comes before the first one as a stem."""

    def forward(self, x: Any) -> Any:
        return run_sequence(list(self._modules.items()), x, _is_converted)[0]


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, ConvertedBlock)


def convert_block(block: nn.Module, engine: Engine | None) -> None:
    """Put every batch norm in `block` under the exactly-once rule, and `block` under `engine`; or raise, and then
    nothing is changed."""
    read_block(block)
    ruled = tuple(name for name, module in block.named_modules() if isinstance(module, UpdatesOnce))
    try:
        newest_first = _tried(block)
    except Exception:
        _free_norms(block, ruled)
        raise
    add_mixin(block, ConvertedBlock)
    block._conversion = Conversion(engine, newest_first, ruled)


def _tried(block: nn.Module) -> bool:
    """Whether `block` puts new features first, as a trial shows that finds nothing else about it.

    In the trial, torch's norms are under the rule already: checkpointing that updates them twice is no difference that
    anybody wants. Those with a forward of their own are themselves in the trial, and torch's from then on.
    """
    foreign = [module for module in block.modules() if isinstance(module, _BATCH_NORMS) and not is_norm(module)]
    for module in block.modules():
        if isinstance(module, _NormBase) and not isinstance(module, UpdatesOnce) and module not in foreign:
            add_mixin(module, UpdatesOnce, innermost=True)  # not by update_once: the class is to keep its name
    with trial(block) as run:
        theirs = run(block.forward)
        for module in foreign:
            add_mixin(module, ComputesAsTorch, innermost=True)
        return order_of(theirs, run, partial(read_block, block))


def restore_block(block: nn.Module) -> None:
    """Undo `convert_block`."""
    remove_mixin(block, ConvertedBlock)
    for module in block.modules():
        fire_always(module)
    _free_norms(block, block._conversion.norms_under_the_rule)
    del block._conversion


def _free_norms(block: nn.Module, but: tuple[str, ...]) -> None:
    for name, module in block.named_modules():
        if isinstance(module, ComputesAsTorch):
            remove_mixin(module, ComputesAsTorch)
        elif isinstance(module, UpdatesOnce) and name not in but:
            update_always(module)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
