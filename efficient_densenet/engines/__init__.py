"""How a dense block is executed: the engine names, and the only place that chooses between them.

`efficient=True` leaves the choice to this module, which may fall back: it says why, once per reason. An engine asked
for by name runs or raises. Where no gradient is wanted, and in tracing, scripting and export, every engine runs the
plain modules, since there is nothing to save.
"""

import warnings
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..checkpoint.parameters import parameters_of
from ..torch_private import functorch_is_active
from . import plain, recompute


class Engine(str, Enum):
    """The ways to execute a dense block."""

    PLAIN = "plain"
    OFFICIAL = "official"
    CHECKPOINT = "checkpoint"


BEST = Engine.CHECKPOINT
"""What `efficient=True` means."""

Squeeze = Callable[[nn.Module, list[Tensor]], Tensor]

_SQUEEZE: dict[Engine, Squeeze] = {
    Engine.PLAIN: plain.squeeze,
    Engine.OFFICIAL: recompute.squeeze_official,
    Engine.CHECKPOINT: recompute.squeeze_checkpoint,
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
    return engine.value if engine else f"best ({BEST.value})"


def squeeze_for(block: nn.Module, x: Tensor) -> Squeeze:
    """How the layers of `block` are to be run on `x` now."""
    if not _wants_gradient(block, x) or _is_exporting(block):
        return plain.squeeze
    asked = block.engine
    engine = asked or BEST
    reason = why_not(engine, x)
    if reason is None:
        return _SQUEEZE[engine]
    if asked is not None:
        raise RuntimeError(
            f"engine {engine.value!r} cannot run here: {reason}; "
            "use engine 'plain', or efficient=True, which falls back to it"
        )
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"falling back to engine 'plain', which keeps everything: {reason}", stacklevel=4)
    return plain.squeeze


def why_not(engine: Engine, x: Tensor) -> str | None:
    """Why `engine` cannot run a block on `x`, or None where it can."""
    if engine is Engine.PLAIN:
        return None
    if functorch_is_active():
        return "found a torch.func transform (vmap, grad, …), but recomputation needs ordinary autograd"
    if forward_ad.unpack_dual(x).tangent is not None:
        return "found a forward-mode derivative, but recomputation needs reverse-mode autograd"
    return None


def _wants_gradient(block: nn.Module, x: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters_of(block)))


def _is_exporting(block: nn.Module) -> bool:
    if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        return True
    if hasattr(torch.compiler, "is_exporting"):
        return torch.compiler.is_exporting()
    # torch 2.6 does not tell export from compilation: what it exports is untraced by dynamo, or in eval mode.
    return torch.compiler.is_compiling() and not (torch.compiler.is_dynamo_compiling() and block.training)
