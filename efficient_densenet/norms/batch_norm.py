"""Batch norms that update their running statistics exactly once, however often their forward is run again.

A checkpointed forward runs twice: once for the value, and once more inside the backward pass. The rule here is to
update in the first run and never while autograd is executing a backward graph. It needs nothing from the code that
does the checkpointing, so it holds in every flavour of it.
"""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase, _NormBase

from .._mixins import add_mixin, remove_mixin
from .._recompute_mode import is_recomputing
from .._torch_private import in_backward

Module = TypeVar("Module", bound=nn.Module)


class UpdatesOnce:
    """Mixin, to stand before a batch norm class: in a recomputation, batch statistics are used but not recorded."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):  # a norm stays one module where torch.fx traces, as torch's own do
            return input.tracer.create_proxy("call_module", input.tracer.path_of_module(self), (input,), {})
        if not (self.training and self.track_running_stats) or _first_run():
            return super().forward(input)
        # A stand-in with the same parameters whose buffers are copies: `self` stays as other threads see it, and the
        # second run saves the same number of tensors as the first, which torch.utils.checkpoint insists on.
        stand_in = copy.copy(self)
        stand_in._buffers = {name: b if b is None else b.clone() for name, b in self._buffers.items()}
        return super(UpdatesOnce, stand_in).forward(input)


class _TorchForward:
    forward = _BatchNorm.forward


class ComputesAsTorch(UpdatesOnce, _TorchForward):
    """Mixin, to stand before a batch norm class with a forward of its own, which is known to do what torch's does."""


class CpBatchNorm1d(UpdatesOnce, nn.BatchNorm1d):
    """`nn.BatchNorm1d` under the exactly-once rule."""


class CpBatchNorm2d(UpdatesOnce, nn.BatchNorm2d):
    """`nn.BatchNorm2d` under the exactly-once rule."""


class CpBatchNorm3d(UpdatesOnce, nn.BatchNorm3d):
    """`nn.BatchNorm3d` under the exactly-once rule."""


class CpSyncBatchNorm(UpdatesOnce, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` under the exactly-once rule."""


cp_BatchNorm2d = CpBatchNorm2d

_NAMED = {
    nn.BatchNorm1d: CpBatchNorm1d,
    nn.BatchNorm2d: CpBatchNorm2d,
    nn.BatchNorm3d: CpBatchNorm3d,
    nn.SyncBatchNorm: CpSyncBatchNorm,
}


def convert_batchnorm(module: Module) -> Module:
    """Put every batch norm inside `module` under the exactly-once rule, in place, and return `module`.

    Each norm stays the same object: only its class changes, to a subclass of what it was. Parameters, buffers, hooks,
    training mode and references held elsewhere (optimizers, lists) are untouched.
    """
    norms = (m for m in module.modules() if isinstance(m, _BatchNorm))
    lazy = next((type(norm).__name__ for norm in norms if isinstance(norm, _LazyNormBase)), None)
    if lazy:
        raise ValueError(
            f"found a {lazy} that has not seen data yet, but a norm needs its channel count to be converted: "
            "run the model once on an example, then convert it"
        )
    for inside in module.modules():
        if isinstance(inside, _BatchNorm):
            update_once(inside)
    return module


def restore_batchnorm(module: Module) -> Module:
    """Undo `convert_batchnorm`, in a DenseNet of this package too, whose norms are then of torch's own classes.

    Some tools know no others: FX quantisation then fuses them with what is before and after. Engines that recompute
    bring the rule back when they run.
    """
    for inside in module.modules():
        if isinstance(inside, UpdatesOnce):
            update_always(inside)
    return module


def update_once(module: nn.Module) -> bool:
    """Put `module`, if it is a norm with running statistics, under the rule; whether anything changed."""
    if not isinstance(module, _NormBase) or isinstance(module, (UpdatesOnce, _LazyNormBase)):
        return False
    if type(module) in _NAMED:
        module.__class__ = _NAMED[type(module)]
    else:
        add_mixin(module, UpdatesOnce, innermost=True)
    return True


def update_always(module: nn.Module) -> None:
    """Undo `update_once`."""
    if type(module) in _NAMED.values():
        module.__class__ = before_the_rule(module)
    else:
        remove_mixin(module, UpdatesOnce)


def before_the_rule(module: nn.Module) -> type[nn.Module]:
    """Torch's own class of a norm, where `module` is one of ours; the class of any other module."""
    return next((theirs for theirs, ours in _NAMED.items() if ours is type(module)), type(module))


def _first_run() -> bool:
    # A compiler traces the first run; what it recomputes afterwards, it recomputes without side effects.
    return torch.compiler.is_compiling() or not (in_backward() or is_recomputing())
