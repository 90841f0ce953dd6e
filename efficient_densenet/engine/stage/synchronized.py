"""A batch norm's statistics, and the sums of its backward, over the processes of a sync group."""

from torch import Tensor

from ...kernels.interface import INV_STD, MEAN, VARIANCE, BatchNormBackward, StatisticsOutput
from ...norms.sync_batch_norm import SyncGroup

Count = int | Tensor
"""The number of values per channel; a tensor where the processes of a sync group have added up their counts."""


def synchronize_statistics(statistics: StatisticsOutput, count: int, sync_group: SyncGroup | None) -> Count:
    """Replace this process's batch statistics by those of all processes of the sync group; return their count."""
    if sync_group is None:
        return count
    rows = statistics.rows
    mean, variance, total = sync_group.statistics(rows[MEAN], rows[VARIANCE], count)
    rows[MEAN].copy_(mean)
    rows[VARIANCE].copy_(variance)
    rows[INV_STD].copy_((variance + statistics.eps).rsqrt_())
    return total


def batch_norm_backward(
    values: Tensor,
    grad_accum: Tensor,
    norm: tuple[Tensor, Tensor | None],
    sums: Tensor,
    count: Count,
    sync_group: SyncGroup | None,
) -> BatchNormBackward:
    """The arguments from which a kernel computes the gradient of a batch norm's input on the fly.

    `grad_accum` holds the gradient of x̂ = (x − μ) · r; `norm` has r and, unless the values are stored centered, μ;
    `sums` are this process's Σg and Σ(g·x̂).
    """
    if sync_group is not None:
        (sums,) = sync_group.sums(sums)
    if isinstance(count, Tensor):
        sums, count = sums / count, 1
    return BatchNormBackward(values, grad_accum, *norm, sums, count)
