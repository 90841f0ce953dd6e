"""Running statistics: updated in the forward, exactly once, from what the operators return.

The update is an operator of its own, `efficient_densenet::update_running_statistics`, the only one that changes its
inputs. Of ordinary operations, three for each norm, a compiler would make hundreds of small kernels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch_private import foreach_add_, foreach_lerp_, in_backward
from ..parts import Norm
from ..precision import as_dtype
from .operators import LIBRARY

LIBRARY.define(
    "update_running_statistics(Tensor(a!)[] running, Tensor(b!)[] num_batches_tracked, Tensor[] batch, "
    "float? momentum) -> ()"
)


class NormUpdate(NamedTuple):
    """A norm with batch statistics, the columns of a matrix of statistics that are its own, and the bias of the
    convolution before it, which that matrix does not contain."""

    norm: Norm
    columns: slice
    bias: Tensor | None = None


def update_running_statistics(updates: Sequence[NormUpdate], statistics: Tensor) -> None:
    """Update running statistics from rows of batch means and unbiased variances, in a forward that is no recomputation.

    Another checkpoint around this forward recomputes it while autograd executes a backward: then nothing is updated.
    """
    if not torch.compiler.is_compiling() and in_backward():
        return
    tracked = [update for update in updates if update.norm.track_running_stats]
    updates = [update for update in tracked if _has_statistics(update.norm)]
    with torch.no_grad():
        for norm, _, _ in tracked:
            if norm.num_batches_tracked is not None and not _has_statistics(norm):
                norm.num_batches_tracked.add_(1)
        mean, variance = statistics[0], statistics[1]
        for momentum in dict.fromkeys(norm.momentum for norm, _, _ in updates):
            running, counts, batch = [], [], []
            for norm, columns, bias in updates:
                if norm.momentum == momentum:
                    means = mean[columns]
                    counts += [] if norm.num_batches_tracked is None else [norm.num_batches_tracked]
                    running += [norm.running_mean, norm.running_var]
                    batch += [means if bias is None else means + bias, variance[columns]]
            torch.ops.efficient_densenet.update_running_statistics.default(running, counts, batch, momentum)


def _has_statistics(norm: Norm) -> bool:
    """Whether there are running statistics to update; any of a norm's buffers may have been set to None."""
    if norm.running_mean is None or norm.running_var is None:
        return False
    return norm.momentum is not None or norm.num_batches_tracked is not None


@torch.library.impl(LIBRARY, "update_running_statistics", "CompositeExplicitAutograd")
def _update(
    running: list[Tensor], num_batches_tracked: list[Tensor], batch: list[Tensor], momentum: float | None
) -> None:
    """running += momentum · (batch − running), for the mean and the variance of each norm.

    Without momentum they are cumulative averages: the weight is 1 / num_batches_tracked.
    """
    if num_batches_tracked:
        foreach_add_(num_batches_tracked, 1)
    dtype, weight = batch[0].dtype, momentum
    if weight is None:
        weight = [weight for count in num_batches_tracked for weight in [count.to(dtype).reciprocal()] * 2]
    wide = [as_dtype(tensor, dtype) for tensor in running]
    foreach_lerp_(wide, batch, weight)
    for tensor, value in zip(running, wide, strict=True):
        if tensor is not value:
            tensor.copy_(value)


@torch.library.register_fake("efficient_densenet::update_running_statistics", lib=LIBRARY)
def _fake_update(
    running: list[Tensor], num_batches_tracked: list[Tensor], batch: list[Tensor], momentum: float | None
) -> None:
    pass
