"""Running statistics: updated in the forward, exactly once, from the statistics that the operators return.

The update is an operator of its own, `efficient_densenet::update_running_statistics`, the only one that changes its
inputs. A compiler would turn ordinary operations, three for each norm, into hundreds of small kernels. The operator
slices the matrix of statistics itself: outside, two slices for each norm would be nodes of a compiler's graph.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._tensors import as_dtype
from ..._torch_private import foreach_add_, foreach_lerp_
from ...norms.batch_norm import is_first_forward
from ..operator import LIBRARY, implement
from ..parts import Norm, buffer_of

LIBRARY.define(
    "update_running_statistics(Tensor(a!)[] running, Tensor(b!)[] num_batches_tracked, Tensor statistics, "
    "int[] columns, Tensor?[] biases, float? momentum) -> ()"
)


class NormUpdate(NamedTuple):
    """A norm with batch statistics, its columns in the matrix of statistics, and the bias of the convolution before it,
    which the means in the matrix do not include."""

    norm: Norm
    columns: slice
    bias: Tensor | None = None


def update_running_statistics(updates: Sequence[NormUpdate], statistics: Tensor) -> None:
    """Update running statistics from rows of batch means and unbiased variances, in a forward that is no recomputation.

    An outer checkpoint recomputes this forward while autograd executes a backward: the recomputation updates nothing.
    """
    if not is_first_forward():
        return
    by_momentum: dict[float | None, _Tensors] = {}
    with torch.no_grad():
        for norm, columns, bias in updates:
            if not norm.track_running_stats:
                continue
            momentum, count = norm.momentum, buffer_of(norm, "num_batches_tracked")
            running_mean, running_var = buffer_of(norm, "running_mean"), buffer_of(norm, "running_var")
            lacks_count = momentum is None and count is None
            if running_mean is None or running_var is None or lacks_count:  # any buffer may have been set to None
                if count is not None:
                    count.add_(1)
                continue
            if momentum not in by_momentum:
                by_momentum[momentum] = _Tensors([], [], [], [])
            tensors = by_momentum[momentum]
            tensors.running.extend((running_mean, running_var))
            tensors.num_batches_tracked.extend(() if count is None else (count,))
            tensors.columns.extend((columns.start, columns.stop))
            tensors.biases.append(bias)
        for momentum, (running, counts, columns, biases) in by_momentum.items():
            arguments = running, counts, statistics, columns, biases, momentum
            torch.ops.efficient_densenet.update_running_statistics.default(*arguments)


class _Tensors(NamedTuple):
    """The tensors of all norms with the same momentum, as the operator takes them."""

    running: list[Tensor]
    num_batches_tracked: list[Tensor]
    columns: list[int]
    biases: list[Tensor | None]


@implement("update_running_statistics")
def _update(
    running: list[Tensor],
    num_batches_tracked: list[Tensor],
    statistics: Tensor,
    columns: list[int],
    biases: list[Tensor | None],
    momentum: float | None,
) -> None:
    """running += momentum · (batch − running), for the mean and the variance of each norm.

    `columns` are the first column of each norm and the column after its last. Without momentum the running statistics
    are cumulative averages: the weight is 1 / num_batches_tracked.
    """
    if num_batches_tracked:
        foreach_add_(num_batches_tracked, 1)
    batch, dtype = _batch_statistics(statistics, columns, biases), statistics.dtype
    weight = _cumulative_weights(num_batches_tracked, batch) if momentum is None else momentum
    updated = [as_dtype(tensor, dtype) for tensor in running]
    foreach_lerp_(updated, batch, weight)
    for tensor, value in zip(running, updated, strict=True):
        if tensor is not value:
            tensor.copy_(value)


def _batch_statistics(statistics: Tensor, columns: list[int], biases: list[Tensor | None]) -> list[Tensor]:
    """The mean and the unbiased variance of each norm."""
    mean, variance, *_ = statistics.unbind()
    batch = []
    for start, stop, bias in zip(columns[::2], columns[1::2], biases, strict=True):
        means = mean[start:stop]
        batch += [means if bias is None else means + bias, variance[start:stop]]
    return batch


def _cumulative_weights(num_batches_tracked: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
    """1 / num_batches_tracked of each norm, for its mean and its variance: a weight for each channel.

    The weights stay on the device, since reading a number there would wait for it; and each has the size of its
    statistics, since PyTorch then updates all norms in one launch.
    """
    weights = torch.stack(num_batches_tracked).to(batch[0].dtype).reciprocal()
    rows = weights[:, None].repeat(1, max(tensor.shape[0] for tensor in batch)).unbind()
    return [rows[i // 2][: tensor.shape[0]] for i, tensor in enumerate(batch)]


@torch.library.register_fake("efficient_densenet::update_running_statistics", lib=LIBRARY)
def _fake_update(*arguments: Any) -> None:
    pass
