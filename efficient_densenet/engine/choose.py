"""Which engine runs a dense block: the engine names, and the only place that chooses between them.

`efficient=True` leaves the choice to this module, which may fall back: it warns once per reason. An engine requested
by name runs or raises. In tracing and export every engine runs the plain modules. Without gradients there is no memory
to save, and every engine runs the plain modules too, unless the shared engine's kernels are faster.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Proxy

from .. import kernels
from .._compilers import CHECKPOINTS_UPDATE_ONCE, is_exporting
from .._tensors import compute_dtype
from .._torch_private import functorch_is_active, parameters_of
from ..norms.sync_batch_norm import is_synchronized, sync_group
from . import layerwise, saving, stem
from .changed_modules import must_be_called, why_not_global_changes
from .parts import EngineBlock, is_engine_block
from .read import USUAL, StageRequest, make_plan, plans_of, read_stage, what_plans_read
from .sharded import can_run_inside
from .stage.run import FORMATS_OF_X, StagePlan
from .stem import StemPlan


class Engine(str, Enum):
    """The ways to run a dense block."""

    PLAIN = "plain"
    OFFICIAL = "official"
    CHECKPOINT = "checkpoint"
    SHARED = "shared"


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
    """The name to show to a reader."""
    return engine.value if engine else "best"


def engine_blocks(model: nn.Module) -> list[tuple[str, EngineBlock]]:
    """The dense blocks of this package in a model, and the converted ones, with their names."""
    return [(name, module) for name, module in model.named_modules() if is_engine_block(module)]


def may_run_engines(module: nn.Module, x: Tensor) -> bool:
    """Whether an engine may run `module` on `x` better than the plain modules: with less saved for an ordinary
    backward, or with a faster forward."""
    if _is_tracing(module, x) or _why_not_ordinary_autograd(x) or _is_left_alone(x, module):
        return False
    return torch.is_grad_enabled() or _has_faster_forward(x)


def plan_block(block: EngineBlock, x: Tensor) -> BlockPlan:
    """How to run `block` on `x` now, when it is called."""
    if _is_tracing(block, x) or _is_left_alone(x, block):
        return BlockPlan(Engine.PLAIN)
    if not _needs_grad(x, block):
        return _plan_without_gradients(block, x)
    engine = block.engine
    if engine is None:
        return _best_plan(block, x)
    if torch.compiler.is_compiling():
        engine = _compiled_engine(engine)
    plan, reason = _plan_by(engine, block, x)
    if plan is None:
        raise RuntimeError(
            f"engine {engine.value!r} cannot run here: {reason}; use another engine, or efficient=True, which finds one"
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


def plans_of_network(modules: Sequence[nn.Module], first: int, x: Any) -> dict[tuple, Any] | None:
    """The kept plans of modules that run one after another on x, if they are as they were; `first` is the number of the
    first block. None where all modules are to be called."""
    if first == len(modules) or not isinstance(x, Tensor) or not may_run_engines(modules[first], x):
        return None
    return None if why_not_global_changes() is not None else plans_of([*modules[first:], *modules[:first]])


def plan_stage(
    plans: dict[tuple, Any], modules: Sequence[nn.Module], position: int, x: Tensor, request: StageRequest = USUAL
) -> StagePlan | None:
    """The plan with which the shared engine runs the block at `position`, and the consumer after it, as one stage on x;
    None where both are to be called."""
    block, consumer = modules[position : position + 2]
    if block.engine not in (None, Engine.SHARED) or _why_not_ordinary_autograd(x) is not None:
        return None
    if not _needs_grad(x, block):
        if not _has_faster_forward(x):
            return None
        request = request._replace(num_saved=None)
    if torch.compiler.is_compiling():
        return _joined(block, consumer, x, request)
    key = (position, *request, *what_plans_read(x))
    if key not in plans:
        plans[key] = _joined(block, consumer, x, request)
    return plans[key]


def _joined(block: EngineBlock, consumer: nn.Module, x: Tensor, request: StageRequest) -> StagePlan | None:
    if must_be_called(block) and not can_run_inside(block, x):
        return None
    stage = make_plan(block, consumer, x, request)
    return None if isinstance(stage, str) or stage.spec.consumer is None else stage


def plan_stem(plans: dict[tuple, Any], modules: Sequence[nn.Module], block: EngineBlock, x: Tensor) -> StemPlan | None:
    """The plan with which the first four of `modules` run as one node on x. None where they are to be called: they are
    no such stem, or another engine runs `block` after them."""
    if len(modules) < 4 or block.engine not in (None, Engine.SHARED):
        return None
    if torch.compiler.is_compiling():
        plan = _stem_before(block, modules, x)
    else:
        key = ("stem", *x.shape, *what_plans_read(x))
        if key not in plans:
            plans[key] = _stem_before(block, modules, x)
        plan = plans[key]
    return plan if plan is not None and _needs_grad(x, *modules[:4]) else None


def _stem_before(block: EngineBlock, modules: Sequence[nn.Module], x: Tensor) -> StemPlan | None:
    plan = stem.stem_at_the_start(modules, x)
    if plan is None:
        return None
    output_like = x.new_empty((), dtype=stem.output_dtype(x)).expand(x.shape[0], plan.num_channels, *x.shape[2:])
    return None if isinstance(make_plan(block, None, output_like, USUAL), str) else plan


def num_saved(plans: dict[tuple, Any], modules: Sequence[nn.Module], x: Tensor) -> Sequence[int] | None:
    """How many layers of each block, the last ones, save their bottlenecks by default, as `saving` has it; None where
    plain modules hold less.

    `modules` are the first block and all that follows. Other networks than blocks, each with its consumer after it, may
    hold most at another moment, and save none; nor does one whose first block needs no gradient, an engine by name, or
    compiled code.
    """
    none = [0] * len(modules)
    if torch.compiler.is_compiling() or not (x.requires_grad and torch.is_grad_enabled()):
        return none  # without a gradient of x the first stage has all gradients, and so the peak
    key = ("sizes",)
    if key not in plans:
        plans[key] = _sizes(modules[::2], modules[1::2])
    sizes, may_run_plain = plans[key]
    counts = saving.num_saved(sizes, x) if sizes else none
    return none if counts is None and not may_run_plain else counts


def _sizes(blocks: Sequence[EngineBlock], consumers: Sequence[nn.Module]) -> tuple[tuple[saving.StageSizes, ...], bool]:
    """The sizes of all stages, none where they are not known, and whether plain modules may run in their place."""
    if len(blocks) != len(consumers) or not all(is_engine_block(each) and each.engine is None for each in blocks):
        return (), False
    sizes = tuple(saving.stage_sizes(*each) for each in zip(blocks, consumers, strict=True))
    # Each process of a sync group has sizes of its own, but must take part in the same collective operations.
    cannot_be_plain = (must_be_called(block) or any(map(is_synchronized, block.modules())) for block in blocks)
    return tuple(each for each in sizes if each is not None) if None not in sizes else (), not any(cannot_be_plain)


def join(block: EngineBlock, consumer: nn.Module, x: Tensor, request: StageRequest = USUAL) -> StagePlan | None:
    """The plan with which the shared engine runs `block` and `consumer` as one stage on `x`, or None."""
    modules = block, consumer
    plans = plans_of_network(modules, 0, x)
    return None if plans is None else plan_stage(plans, modules, 0, x, request)


def run_stage_with_features(block: EngineBlock, consumer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of `consumer` on the output of `block`, and the output of `block`."""
    stage = join(block, consumer, x, StageRequest(FORMATS_OF_X, return_features=True))
    if stage is not None:
        output, features = stage.run(x)
        return output, features
    features = block(x)
    return consumer(features), features


def run_consumer(consumer: nn.Module, x: Tensor) -> Tensor | None:
    """The output of a transition or a norm that does not run together with its block, by the shared engine.

    None where the shared engine cannot run `consumer`, or would save no memory: the caller must then call `consumer`.
    """
    if not may_run_engines(consumer, x) or not _needs_grad(x, consumer):
        return None
    plan = read_stage(None, consumer, x)
    return None if isinstance(plan, str) else plan.run(x)[0]


def why_not(engine: Engine, block: EngineBlock, x: Tensor) -> str | None:
    """Why `engine` cannot run `block` on `x`, or None where it can."""
    return _plan_by(engine, block, x)[1]


def _plan_without_gradients(block: EngineBlock, x: Tensor) -> BlockPlan:
    if block.engine in (None, Engine.SHARED) and _has_faster_forward(x):
        plan, _ = _plan_by(Engine.SHARED, block, x, StageRequest(FORMATS_OF_X, num_saved=None))
        if plan is not None:
            return plan
    return BlockPlan(Engine.PLAIN)


def _has_faster_forward(x: Tensor) -> bool:
    """Whether the shared engine's forward is faster on `x` than the plain modules.

    The Numba kernels were measured to be faster: they write no concatenation (docs/benchmarks.md).
    """
    if torch.compiler.is_compiling() or not kernels.numba_supports(x):
        return False
    return kernels.numba_multiplies(compute_dtype(x))


def _compiled_engine(engine: Engine) -> Engine:
    """The engine that a compiler runs in place of `engine`. Of the engines that recompute, compilers support
    `official` alone, and only some of them update running statistics once in it."""
    if engine in (Engine.PLAIN, Engine.SHARED):
        return engine
    return Engine.OFFICIAL if CHECKPOINTS_UPDATE_ONCE else Engine.PLAIN


def _best_plan(block: EngineBlock, x: Tensor) -> BlockPlan:
    best, *others = Engine.SHARED, Engine.CHECKPOINT, Engine.PLAIN
    plan, reason = _plan_by(best, block, x)
    if plan is not None:
        return plan
    if torch.compiler.is_compiling():
        may_recompute = block.why_not_recompute() is None
        return BlockPlan(_compiled_engine(Engine.CHECKPOINT) if may_recompute else Engine.PLAIN)
    plan = next(plan for plan, _ in (_plan_by(engine, block, x) for engine in others) if plan is not None)
    warn_once(f"falling back from engine {best.value!r} to {plan.engine.value!r}: {reason}")
    return plan


def _plan_by(
    engine: Engine, block: EngineBlock, x: Tensor, request: StageRequest = USUAL
) -> tuple[BlockPlan | None, str | None]:
    """How `engine` runs `block` on `x`, or why it cannot."""
    if engine is Engine.PLAIN:
        return BlockPlan(engine), None
    reason = _why_not_ordinary_autograd(x)
    if reason is not None:
        return None, reason
    if engine is Engine.SHARED:
        stage = read_stage(block, None, x, request)
        return (None, stage) if isinstance(stage, str) else (BlockPlan(engine, stage), None)
    reason = block.why_not_recompute() or layerwise.why_not_recompute(block)
    return (BlockPlan(engine), None) if reason is None else (None, reason)


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


def _why_not_ordinary_autograd(x: Tensor) -> str | None:
    """Why autograd cannot recompute here, or None; compiled code has no transforms or forward-mode derivatives."""
    if torch.compiler.is_compiling():
        return None
    if functorch_is_active():
        return "found a torch.func transform (vmap, grad, …), but recomputation needs ordinary autograd"
    if forward_ad.unpack_dual(x).tangent is not None:
        return "found a forward-mode derivative, but recomputation needs reverse-mode autograd"
    return None


def _is_tracing(block: EngineBlock, x: Tensor) -> bool:
    return isinstance(x, Proxy) or is_exporting(block.training)


def _is_left_alone(x: Tensor, module: nn.Module) -> bool:
    """Whether a batch is empty, with which the plain modules do nothing. Synchronized norms communicate even then, and
    must do it as those of the other processes, in the same engine."""
    return x.numel() == 0 and not any(sync_group(each) is not None for each in module.modules())


def _needs_grad(x: Tensor, *modules: nn.Module) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters_of(*modules)))
