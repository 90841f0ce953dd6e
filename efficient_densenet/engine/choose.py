"""Which engine runs a dense block that is called, and the engines' names; `plan` has the stages of a network.

`efficient=True` leaves the choice to this module, which may fall back: it warns once per reason. An engine requested
by name runs or raises. In tracing and export every engine runs the plain modules. Without gradients there is no memory
to save, and every engine runs the plain modules too, unless the shared engine's kernels are faster.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from enum import Enum
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .. import kernels
from .._compilers import CHECKPOINTS_UPDATE_ONCE, is_exporting
from ..norms.sync_batch_norm import sync_group
from . import layerwise
from .limits import why_not_ordinary_autograd
from .parts import EngineBlock, is_engine_block
from .plan import has_faster_forward, needs_grad, plan_alone
from .stage.run import USUAL_REQUEST, StagePlan, StageRequest


class Engine(str, Enum):
    """The ways to run a dense block."""

    PLAIN = "plain"
    OFFICIAL = "official"
    CHECKPOINT = "checkpoint"
    SHARED = "shared"


EngineName = Literal["best", "plain", "official", "checkpoint", "shared"]
"""The names of engines; "best", or True, leaves the choice to this module, and False is "plain"."""


class BlockPlan(NamedTuple):
    """The engine that runs a block on one input, and the plan of its stage if that is the shared engine."""

    engine: Engine
    stage: StagePlan | None = None


RUN_FIRST_HALF = {
    Engine.PLAIN: layerwise.run_first_half_plain,
    Engine.OFFICIAL: layerwise.run_first_half_official,
    Engine.CHECKPOINT: layerwise.run_first_half_checkpoint,
}

_warned: set[str] = set()


def parse(efficient: bool | str | None) -> Engine | None:
    """The engine that a user's `efficient` names; None leaves the choice to `choose`."""
    if efficient is True or efficient == describe(None):
        return None
    if efficient is False or efficient is None:
        return Engine.PLAIN
    try:
        return Engine(efficient)
    except ValueError as exc:
        names = ", ".join(repr(engine.value) for engine in Engine)
        raise ValueError(
            f"unknown engine {efficient!r}: use one of {names}, True or 'best' for the best one, False for 'plain'"
        ) from exc


def describe(engine: Engine | None) -> str:
    """The name to show to a user."""
    return engine.value if engine else "best"


def engine_blocks(model: nn.Module) -> list[tuple[str, EngineBlock]]:
    """The dense blocks of this package in a model, and the converted ones, with their names."""
    return [(name, module) for name, module in model.named_modules() if is_engine_block(module)]


def may_run_engines(module: nn.Module, x: Tensor) -> bool:
    """Whether an engine may run `module` on `x` better than the plain modules: with less saved for an ordinary
    backward, or with a faster forward."""
    if _must_be_plain(module, x) or why_not_ordinary_autograd(x):
        return False
    return torch.is_grad_enabled() or has_faster_forward(x)


def may_be_shared(block: EngineBlock) -> bool:
    """Whether the user allows the shared engine for a block."""
    return block.engine in (None, Engine.SHARED)


def plan_block(block: EngineBlock, x: Tensor) -> BlockPlan:
    """How to run `block` on `x` now, when it is called."""
    if _must_be_plain(block, x):
        return BlockPlan(Engine.PLAIN)
    if not needs_grad(x, block):
        if may_be_shared(block) and has_faster_forward(x):
            plan = _plan_by(Engine.SHARED, block, x, StageRequest(num_saved=None))
            if not isinstance(plan, str):
                return plan
        return BlockPlan(Engine.PLAIN)
    engine = block.engine
    if engine is None:
        reason = _plan_by(Engine.SHARED, block, x)
        if not isinstance(reason, str):
            return reason
        if torch.compiler.is_compiling():
            may_recompute = block.why_not_recompute() is None
            return BlockPlan(_compiled_engine(Engine.CHECKPOINT) if may_recompute else Engine.PLAIN)
        others = (_plan_by(each, block, x) for each in (Engine.CHECKPOINT, Engine.PLAIN))
        plan = next(plan for plan in others if not isinstance(plan, str))
        warn_once(f"falling back from engine {Engine.SHARED.value!r} to {plan.engine.value!r}: {reason}")
        return plan
    if torch.compiler.is_compiling():
        engine = _compiled_engine(engine)
    plan = _plan_by(engine, block, x)
    if isinstance(plan, str):
        raise RuntimeError(
            f"engine {engine.value!r} cannot run here: {plan}; use another engine, or efficient=True, which finds one"
        )
    return plan


def describe_plan(block: EngineBlock, x: Tensor, compiled: bool = False) -> str:
    """The engine that trains `block` on `x`, such as "checkpoint" or "shared (Numba)", for a report.

    `x` may be any tensor of the block's input's shape, dtype and device; `compiled` is for a model in torch.compile.
    """
    engine = plan_block(block, x).engine
    engine = _compiled_engine(engine) if compiled else engine
    return f"{engine.value} ({kernels.kernel_set_name(x)})" if engine is Engine.SHARED else engine.value


def run_block(block: EngineBlock, x: Tensor, plan: BlockPlan) -> Tensor:
    """The output of a dense block."""
    if plan.stage is not None:
        return plan.stage.run(x)[0]
    return block.run_layers(x, RUN_FIRST_HALF[plan.engine])


def run_consumer(consumer: nn.Module, x: Tensor) -> Tensor | None:
    """The output of a transition or a norm that does not run together with its block, by the shared engine.

    None where the shared engine cannot run `consumer`, or would save no memory: the caller must then call `consumer`.
    """
    if not may_run_engines(consumer, x) or not needs_grad(x, consumer):
        return None
    plan = plan_alone(None, consumer, x, USUAL_REQUEST)
    return None if isinstance(plan, str) else plan.run(x)[0]


def why_not(engine: Engine, block: EngineBlock, x: Tensor) -> str | None:
    """Why `engine` cannot run `block` on `x`, or None where it can."""
    plan = _plan_by(engine, block, x)
    return plan if isinstance(plan, str) else None


def _compiled_engine(engine: Engine) -> Engine:
    """The engine that a compiler runs in place of `engine`. Of the engines that recompute, compilers support
    `official` alone, and only some of them update running statistics once in it."""
    if engine in (Engine.PLAIN, Engine.SHARED):
        return engine
    return Engine.OFFICIAL if CHECKPOINTS_UPDATE_ONCE else Engine.PLAIN


def _plan_by(engine: Engine, block: EngineBlock, x: Tensor, request: StageRequest = USUAL_REQUEST) -> BlockPlan | str:
    """How `engine` runs `block` on `x`, or why it cannot."""
    reason = None if engine is Engine.PLAIN else why_not_ordinary_autograd(x)
    if reason is None and engine is Engine.SHARED:
        stage = plan_alone(block, None, x, request)
        return stage if isinstance(stage, str) else BlockPlan(engine, stage)
    if reason is None and engine is not Engine.PLAIN:
        reason = block.why_not_recompute() or layerwise.why_not_recompute(block)
    return BlockPlan(engine) if reason is None else reason


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        frame, stacklevel = sys._getframe(), 1  # the first frame outside these packages, which calls the model
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("efficient_densenet", "torch"):
            frame, stacklevel = frame.f_back, stacklevel + 1
        warnings.warn(message, stacklevel=stacklevel)


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """In this context there are no warnings; those of this module come when they are due for the next time."""
    before = set(_warned)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _warned.clear()
        _warned.update(before)


def _must_be_plain(module: nn.Module, x: Tensor) -> bool:
    """Whether `module` is traced or exported, or the batch is empty, with which plain modules do nothing. Synchronized
    norms communicate even then, and must do it as those of the other processes, in the same engine."""
    if isinstance(x, Proxy) or is_exporting(module.training):
        return True
    return x.numel() == 0 and not any(sync_group(each) is not None for each in module.modules())
