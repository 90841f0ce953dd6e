"""How a dense block is executed: the engine names, and the only place that chooses between them.

`efficient=True` leaves the choice to this module, which may fall back: it says why, once per reason. An engine asked
for by name runs or raises. Where no gradient is wanted, and in tracing and export, every engine runs the plain modules,
since there is nothing to save.
"""

import warnings
from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Proxy

from .._torch_private import compilers_recompute_exactly, functorch_is_active, is_exporting
from ..checkpoint.parameters import parameters_of
from . import plain, recompute, stem
from .eligibility import can_consume, is_watched, why_not_shared
from .shared import stage as shared


class Engine(str, Enum):
    """The ways to execute a dense block."""

    PLAIN = "plain"
    OFFICIAL = "official"
    CHECKPOINT = "checkpoint"
    SHARED = "shared"


BY_LAYER = {
    Engine.PLAIN: plain.run_first_half,
    Engine.OFFICIAL: recompute.run_first_half_official,
    Engine.CHECKPOINT: recompute.run_first_half_checkpoint,
}

_warned: set[str] = set()


def parse(efficient: bool | str | None) -> Engine | None:
    """The engine that a user's `efficient` names; None leaves the choice to the dispatcher."""
    if efficient is True:
        return None
    if efficient is False or efficient is None:
        return Engine.PLAIN
    try:
        return Engine(efficient)
    except ValueError as exc:
        names = ", ".join(repr(engine.value) for engine in Engine)
        raise ValueError(
            f"unknown engine {efficient!r}: use one of {names}, True for the best one or False for 'plain'"
        ) from exc


def describe(engine: Engine | None) -> str:
    """The name to show to a reader."""
    return engine.value if engine else "best"


def run_block(block: nn.Module, x: Tensor, engine: Engine) -> Tensor:
    """The output of a dense block; one that is not ours has `run_layers` too, and parts that can be read."""
    if engine is Engine.SHARED:
        return shared.run(block, x)
    return block.run_layers(x, BY_LAYER[engine])


def run_stage(block: nn.Module, consumer: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The output of `block`, and 0; or, where they can run as one, of `consumer` after it, and 1."""
    if not is_watched(block) and choose(block, x) is Engine.SHARED and can_consume(block, consumer):
        return shared.run(block, x, consumer), 1
    return block(x), 0


def run_stem(modules: Sequence[nn.Module], block: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The output of the first four of `modules`, and 4; or, where they cannot run as one, or `block` after them runs by
    another engine than the shared one, `x` and 0."""
    if _is_tracing(block, x) or torch.compiler.is_compiling() or functorch_is_active() or x.numel() == 0:
        return x, 0
    found = stem.stem_at_the_start(modules, x)
    if found is None or not _wants_gradient(x, *found) or forward_ad.unpack_dual(x).tangent is not None:
        return x, 0
    if block.engine not in (None, Engine.SHARED) or why_not(Engine.SHARED, block, _after(found, x)) is not None:
        return x, 0
    return stem.run(found, x), len(found)


def _after(found: stem.Stem, x: Tensor) -> Tensor:
    """Stands for what the stem gives, of which nobody has asked the size."""
    return x.new_empty((), dtype=stem.output_dtype(x)).expand(x.shape[0], found.conv.out_channels, *x.shape[2:])


def run_tapped(block: nn.Module, consumer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of `consumer` on that of `block`, and the latter."""
    if not is_watched(block) and choose(block, x) is Engine.SHARED and can_consume(block, consumer):
        return shared.run_with_features(block, x, consumer)
    features = block(x)
    return consumer(features), features


def choose(block: nn.Module, x: Tensor) -> Engine:
    """The engine to run `block` by on `x` now."""
    if _is_tracing(block, x):
        return Engine.PLAIN
    if torch.compiler.is_compiling():
        # Compilers know torch's own checkpointing, and no autograd of ours.
        saving = block.engine is not Engine.PLAIN and compilers_recompute_exactly()
        return Engine.OFFICIAL if saving else Engine.PLAIN
    if x.numel() == 0 or not _wants_gradient(x, block):
        return Engine.PLAIN
    if block.engine is not None:
        reason = why_not(block.engine, block, x)
        if reason is not None:
            raise RuntimeError(
                f"engine {block.engine.value!r} cannot run here: {reason}; "
                "use another engine, or efficient=True, which finds one"
            )
        return block.engine
    best, *others = Engine.SHARED, Engine.CHECKPOINT, Engine.PLAIN
    reason = why_not(best, block, x)
    if reason is None:
        return best
    chosen = next(engine for engine in others if why_not(engine, block, x) is None)
    _warn_once(f"falling back from engine {best.value!r} to {chosen.value!r}: {reason}")
    return chosen


def why_not(engine: Engine, block: nn.Module, x: Tensor) -> str | None:
    """Why `engine` cannot run `block` on `x`, or None where it can."""
    if engine is Engine.PLAIN:
        return None
    if functorch_is_active():
        return "found a torch.func transform (vmap, grad, …), but recomputation needs ordinary autograd"
    if forward_ad.unpack_dual(x).tangent is not None:
        return "found a forward-mode derivative, but recomputation needs reverse-mode autograd"
    return why_not_shared(block, x) if engine is Engine.SHARED else recompute.why_not_recompute(block)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=5)


def _is_tracing(block: nn.Module, x: Tensor) -> bool:
    return isinstance(x, Proxy) or is_exporting(block.training)


def _wants_gradient(x: Tensor, *modules: nn.Module) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters_of(*modules)))
