"""Batch norm over the pictures of all processes, on any device: torch's own is for accelerators only."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from .batch_norm import UpdatesOnce, convert_batchnorm


def synchronise_norms(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let every batch norm inside take its statistics over all processes; parameters and buffers stay."""
    if next(model.parameters()).is_cuda:
        convert_batchnorm(nn.SyncBatchNorm.convert_sync_batchnorm(model, group))
        return
    for module in model.modules():
        for theirs, ours in _SYNCED.items():
            if isinstance(module, theirs):
                module.__class__ = ours
                module.process_group = group


class _Synced(_BatchNorm):
    process_group: dist.ProcessGroup | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        output, mean, var, count = _Normalise.apply(input, self.weight, self.bias, self.eps, self.process_group)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            momentum = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), momentum)
        return output


class SyncedBatchNorm1d(UpdatesOnce, _Synced, nn.BatchNorm1d):
    """`nn.BatchNorm1d` on the joined batch of a process group, under the exactly-once rule."""


class SyncedBatchNorm2d(UpdatesOnce, _Synced, nn.BatchNorm2d):
    """`nn.BatchNorm2d` on the joined batch of a process group, under the exactly-once rule."""


class SyncedBatchNorm3d(UpdatesOnce, _Synced, nn.BatchNorm3d):
    """`nn.BatchNorm3d` on the joined batch of a process group, under the exactly-once rule."""


_SYNCED = {nn.BatchNorm1d: SyncedBatchNorm1d, nn.BatchNorm2d: SyncedBatchNorm2d, nn.BatchNorm3d: SyncedBatchNorm3d}


class SyncGroup(NamedTuple):
    """The processes over which a norm takes its statistics."""

    group: dist.ProcessGroup | None

    def statistics(self, mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and count, from each process's own: no difference of large sums is taken."""
        own = torch.stack([torch.full_like(mean, count), mean, variance])
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, own, group=self.group)
        counts, means, variances = torch.stack(gathered).unbind(1)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total
        return mean, (counts * (variances + (means - mean).square())).sum(0) / total, total[0]

    def sums(self, *own: Tensor) -> tuple[Tensor, ...]:
        """The same sums over the rows of all processes."""
        joined = torch.stack(own)
        dist.all_reduce(joined, group=self.group)
        return joined.unbind()


def sync_group(norm: nn.Module) -> SyncGroup | None:
    """Whom this norm shares its statistics with."""
    return SyncGroup(norm.process_group) if isinstance(norm, _Synced) else None


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        var, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
        mean, var, count = SyncGroup(group).statistics(mean, var, x.numel() // x.shape[1])
        inv_std = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inv_std, count)
        ctx.group = group
        output = _normalised(x, mean, inv_std) * _per_channel(weight, x) + _per_channel(bias, x)
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, inv_std, count = ctx.saved_tensors
        normalised, grad = _normalised(x, mean, inv_std), grad.to(mean.dtype)
        sums = grad.sum(_all_but_channels(x)), (grad * normalised).sum(_all_but_channels(x))
        of_grad, of_product = (joined / count for joined in SyncGroup(ctx.group).sums(*sums))
        centred = grad - _per_channel(of_grad, x) - normalised * _per_channel(of_product, x)
        grad_x = centred * _per_channel(inv_std * weight.to(inv_std.dtype), x)
        # The parameters' gradients stay this process's own: they are joined with all others.
        return grad_x.to(x.dtype), sums[1].to(weight.dtype), sums[0].to(weight.dtype), None, None


def _normalised(x: Tensor, mean: Tensor, inv_std: Tensor) -> Tensor:
    return (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(inv_std, x)


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return 0, *range(2, x.dim())


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Values for each channel of `x`, to be computed with it."""
    return values.view(-1, *[1] * (x.dim() - 2))
