"""Batch norms synchronized over a process group, on any device; nn.SyncBatchNorm runs on accelerators only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from .._dimensions import classes
from .._mixins import add_mixin, base_class, remove_mixin
from .._torch_private import process_group_named
from .batch_norm import convert_batchnorm, is_first_forward, restore_batchnorm


def synchronize_norms(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let every batch norm inside `model` compute its statistics over all processes of `group`, in place.

    Parameters and buffers stay the same objects.
    """
    if next(model.parameters()).is_cuda:
        convert_batchnorm(nn.SyncBatchNorm.convert_sync_batchnorm(model, group))
        return
    for module in restore_batchnorm(model).modules():
        if isinstance(module, classes("BatchNorm")):
            if not isinstance(module, SynchronizedNorm):
                add_mixin(module, SynchronizedNorm)
            vars(module)["process_group"] = group


class SynchronizedNorm(_BatchNorm if TYPE_CHECKING else object):
    """Mixin for batch norm classes: statistics over the batches of a process group, under the exactly-once rule."""

    process_group: dist.ProcessGroup | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        weight = input.new_ones(self.num_features) if self.weight is None else self.weight
        bias = input.new_zeros(self.num_features) if self.bias is None else self.bias
        group = SyncGroup(self.process_group)
        output, mean, var, count = _SyncedBatchNormFunction.apply(input, weight, bias, self.eps, group)
        if not self.track_running_stats or not is_first_forward():
            return output
        buffers = self.num_batches_tracked, self.running_mean, self.running_var
        num_batches_tracked, running_mean, running_var = cast("tuple[Tensor, Tensor, Tensor]", buffers)
        with torch.no_grad():
            num_batches_tracked.add_(1)
            momentum: Any = self.momentum
            if momentum is None:  # a cumulative average; a tensor, since reading a number would wait for the device
                momentum = num_batches_tracked.to(running_mean.dtype).reciprocal()
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        return output


class SyncGroup(NamedTuple):
    """The process group over which a norm synchronizes its statistics; `group` is None for the default group."""

    group: dist.ProcessGroup | None

    @property
    def name(self) -> str:
        """The name from which `named` gets the group in an operator: operators take no Python objects."""
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None  # a norm is synchronized only after init_process_group
        return group.group_name

    @property
    def size(self) -> int:
        """The number of processes."""
        return dist.get_world_size(self.group)

    @classmethod
    def named(cls, name: str | None) -> "SyncGroup | None":
        return None if name is None else cls(process_group_named(name))

    def statistics(self, mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, biased variance and count over all processes, from this process's mean, biased variance and count.

        Chan's parallel formula, with nᵢ, mᵢ and vᵢ the count, mean and variance of process i, and N = Σ nᵢ:
        M = Σ nᵢ·mᵢ / N and V = Σ nᵢ·(vᵢ + (mᵢ − M)²) / N. It subtracts no large sums, which would lose precision.
        """
        channels = mean.shape[0]
        local = torch.cat([mean, variance, mean.new_full((1,), count)])
        if count == 0:  # an empty batch has no mean
            local.zero_()
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local, group=self.group)
        means, variances, counts = torch.stack(gathered).split([channels, channels, 1], dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        return mean, (counts * (variances + (means - mean).square())).sum(0) / total, total

    def sums(self, *local: Tensor) -> tuple[Tensor, ...]:
        """The sums over all processes of tensors of one shape."""
        reduced = torch.stack(local)
        dist.all_reduce(reduced, group=self.group)
        return reduced.unbind()


def sync_group(norm: nn.Module) -> SyncGroup | None:
    """The process group over which `norm` synchronizes its statistics in training mode, or None.

    Without processes nn.SyncBatchNorm is an ordinary batch norm.
    """
    if isinstance(norm, nn.SyncBatchNorm):
        return SyncGroup(norm.process_group or None) if dist.is_available() and dist.is_initialized() else None
    return SyncGroup(norm.process_group) if isinstance(norm, SynchronizedNorm) else None


def is_synchronized(module: nn.Module) -> bool:
    """Whether `module` is a norm whose `sync_group` is not None, or not None once there are processes."""
    return isinstance(module, (nn.SyncBatchNorm, SynchronizedNorm))


class _LocalStatistics(_BatchNorm if TYPE_CHECKING else object):
    """Mixin for nn.SyncBatchNorm: the statistics of this process's batch alone."""

    forward = _BatchNorm.forward


@contextmanager
def local_statistics(model: nn.Module) -> Iterator[None]:
    """Let each nn.SyncBatchNorm in `model` run in this context without other processes, which do not run it now."""
    norms = [each for each in model.modules() if base_class(type(each)).forward is nn.SyncBatchNorm.forward]
    for norm in norms:
        add_mixin(norm, _LocalStatistics, innermost=True)
    try:
        yield
    finally:
        for norm in norms:
            remove_mixin(norm, _LocalStatistics)


class _SyncedBatchNormFunction(torch.autograd.Function):
    """Batch norm in training mode, with x̂ = (x − mean)·r, r = 1/√(var + eps) and statistics over all processes:
    output = weight·x̂ + bias and grad_input = weight·r·(g − mean(g) − x̂·mean(g·x̂)), where g is grad_output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: SyncGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        var, mean = torch.var_mean(values, _all_but_channels(x), correction=0)
        mean, var, count = group.statistics(mean, var, x.shape[0] * x.shape[2:].numel())
        inv_std = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight.detach(), mean, inv_std, count)  # hooks of a saved parameter may be lost
        ctx.group = group
        output = _normalize(x, mean, inv_std) * _per_channel(weight, x) + _per_channel(bias, x)
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable hides the name of ctx)
        ctx: Any, grad_output: Tensor, *_: Any
    ) -> tuple[Tensor | None, ...]:
        x, weight, mean, inv_std, count = ctx.saved_tensors
        normalized, grad_output = _normalize(x, mean, inv_std), grad_output.to(mean.dtype)
        grad_bias = grad_output.sum(_all_but_channels(x))
        grad_weight = (grad_output * normalized).sum(_all_but_channels(x))
        mean_grad, mean_product = (total / count for total in ctx.group.sums(grad_bias, grad_weight))
        centered = grad_output - _per_channel(mean_grad, x) - normalized * _per_channel(mean_product, x)
        grad_input = centered * _per_channel(inv_std * weight.to(inv_std.dtype), x)
        # The parameters' gradients are this process's own: DistributedDataParallel reduces them later, with all other
        # gradients.
        return grad_input.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None


def _normalize(x: Tensor, mean: Tensor, inv_std: Tensor) -> Tensor:
    return (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(inv_std, x)


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return 0, *range(2, x.dim())


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """View `values`, one for each channel, so that they broadcast over `x`."""
    return values.view(-1, *[1] * (x.dim() - 2))
