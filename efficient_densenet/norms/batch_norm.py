"""Batch norms that update their running statistics exactly once a step, however often their forward is recomputed.

A checkpointed forward runs twice: once for its value, and once more, as a recomputation, inside the backward pass. The
exactly-once rule is to update the running statistics in the forward and never while autograd executes a backward graph.
The rule needs no help from the checkpointing code, so it holds for every implementation of checkpointing.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase, _NormBase

from .._mixins import add_mixin, remove_mixin
from .._recompute_mode import is_recomputing
from .._torch_private import in_backward, without_dispatch_modes

Module = TypeVar("Module", bound=nn.Module)
STATISTICS = "running_mean", "running_var", "num_batches_tracked"
"""What a forward in training mode updates. Torch's norms have buffers; other code may have parameters or attributes."""

if TYPE_CHECKING:
    _NormMixin = _BatchNorm  # the mixins call methods of the norm that they are added to
else:
    _NormMixin = object


class UpdatesOnce(_NormMixin):
    """Mixin for batch norm classes: a recomputation uses batch statistics and leaves the running statistics alone."""

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, UpdatesOnce):  # a method that was bound before stays so after `restore_batchnorm`
            return type(self).forward(self, input)
        if isinstance(input, Proxy):  # torch.fx records this norm as a single module, as it does for torch's own
            tracer: Any = input.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), {})
        if not (self.training and self.track_running_stats) or is_first_forward():
            return super().forward(input)
        # Recompute with a shallow copy that has clones of the buffers. `self` never changes, not even for a moment that
        # another thread could see, and the recomputation saves as many tensors as the forward, which
        # torch.utils.checkpoint requires.
        copied = object.__new__(type(self))  # copy.copy would call the __new__ of a class that fully_shard made
        copied.__dict__.update(vars(self))
        with without_dispatch_modes():  # selective checkpointing requires the operations of the forward, and no others
            copied._buffers = {name: b if b is None else _copy(b) for name, b in self._buffers.items()}
            no_buffers = {name: getattr(self, name, None) for name in STATISTICS if name not in self._buffers}
            vars(copied).update({name: _copy(b) for name, b in no_buffers.items() if b is not None})
        return super(UpdatesOnce, copied).forward(input)


def _copy(buffer: Tensor) -> Any:
    """A copy that says of what, since no dispatch mode sees it made."""
    copied: Any = buffer.detach().clone()
    copied.copy_of = buffer
    return copied


class CpBatchNorm1d(UpdatesOnce, nn.BatchNorm1d):
    """`nn.BatchNorm1d` under the exactly-once rule."""


class CpBatchNorm2d(UpdatesOnce, nn.BatchNorm2d):
    """`nn.BatchNorm2d` under the exactly-once rule."""


class CpBatchNorm3d(UpdatesOnce, nn.BatchNorm3d):
    """`nn.BatchNorm3d` under the exactly-once rule."""


class CpSyncBatchNorm(UpdatesOnce, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` under the exactly-once rule."""


cp_BatchNorm2d = CpBatchNorm2d

_UPDATES_ONCE = {
    nn.BatchNorm1d: CpBatchNorm1d,
    nn.BatchNorm2d: CpBatchNorm2d,
    nn.BatchNorm3d: CpBatchNorm3d,
    nn.SyncBatchNorm: CpSyncBatchNorm,
}
TORCH_CLASSES: dict[type[nn.Module], type[nn.Module]] = {ours: original for original, ours in _UPDATES_ONCE.items()}
"""Torch's class for each of the `Cp…` classes."""


def convert_batchnorm(module: Module) -> Module:
    """Put every batch norm inside `module` under the exactly-once rule, in place, and return `module`.

    Each norm stays the same object; its class becomes a subclass of its old class. Parameters, buffers, hooks, training
    mode and references from elsewhere (optimizers, lists) are untouched.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    lazy = next((type(norm).__name__ for norm in norms if isinstance(norm, _LazyNormBase)), None)
    if lazy:
        raise ValueError(
            f"found a {lazy} that has not seen data yet, so that its number of channels is unknown: run the model once "
            "on an example, then convert it"
        )
    for norm in norms:
        update_once(norm)
    return module


def restore_batchnorm(module: Module) -> Module:
    """Undo `convert_batchnorm`, also in a DenseNet of this package, whose norms then have torch's own classes.

    Some tools recognize only torch's classes; FX quantization, for example, fuses such norms with neighboring modules.
    The engines that recompute convert the norms again when they run.
    """
    for inner in module.modules():
        if isinstance(inner, UpdatesOnce):
            undo_update_once(inner)
    return module


def update_once(module: nn.Module) -> bool:
    """Put `module` under the exactly-once rule if it is a norm with running statistics; return whether it changed."""
    if not isinstance(module, _NormBase) or isinstance(module, (UpdatesOnce, _LazyNormBase)):
        return False
    if type(module) in _UPDATES_ONCE:
        module.__class__ = _UPDATES_ONCE[type(module)]
    else:
        add_mixin(module, UpdatesOnce, innermost=True)
    return True


def undo_update_once(module: nn.Module) -> None:
    """Undo `update_once`."""
    if type(module) in TORCH_CLASSES:
        module.__class__ = torch_class(module)
    else:
        remove_mixin(module, UpdatesOnce)


def torch_class(module: nn.Module) -> type[nn.Module]:
    """Torch's class for a norm of one of the `Cp…` classes; for any other module, its own class."""
    return TORCH_CLASSES.get(type(module), type(module))


def is_first_forward() -> bool:
    """Whether norms update their running statistics: not in a recomputation, which may run inside of a backward."""
    # A compiler traces the forward only, and its recomputation has no side effects.
    return torch.compiler.is_compiling() or not (in_backward() or is_recomputing())
