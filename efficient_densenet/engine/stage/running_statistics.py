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
from ...norms.batch_norm import STATISTICS, is_first_forward
from ..operator import LIBRARY, are_ordinary, implement
from ..parts import Norm

LIBRARY.define(
    "update_running_statistics(Tensor(a!)[] running, Tensor(b!)[] num_batches_tracked, Tensor statistics, "
    "int[] columns, Tensor?[] biases, float? momentum) -> ()"
)


class NormUpdate(NamedTuple):
    """A norm with batch statistics, its columns in the matrix of statistics, and the position among the parameters of
    the bias of the convolution before it, which the means in the matrix do not include; None without a bias."""

    norm: Norm
    columns: slice
    bias: int | None = None


class RunningStatistics:
    """The running statistics of norms that a forward updates, which are read anew in each."""

    def __init__(self, updates: Sequence[NormUpdate]) -> None:
        self.calls: list[tuple[float | None, list[tuple[dict[str, Any], tuple[int, int], int | None]]]] = []
        for norm, columns, bias in updates:
            if norm.track_running_stats:
                if not self.calls or self.calls[-1][0] != norm.momentum:  # norms that share a tensor keep their order
                    self.calls.append((norm.momentum, []))
                self.calls[-1][1].append((norm.__dict__, (columns.start, columns.stop), bias))

    def update(self, statistics: Tensor, parameters: Sequence[Tensor | None]) -> None:
        """Update them from rows of batch means and unbiased variances, in a forward that is no recomputation.

        An outer checkpoint recomputes this forward while autograd executes a backward: the recomputation updates
        nothing.
        """
        if not self.calls or not is_first_forward():
            return
        with torch.no_grad():
            for momentum, norms in self.calls:
                running, counts, columns, biases = [], [], [], []
                for attributes, (start, stop), bias in norms:
                    buffers = attributes["_buffers"]
                    mean, variance = buffers.get("running_mean"), buffers.get("running_var")
                    count = buffers.get("num_batches_tracked")
                    if mean is None or variance is None or count is None:  # other code may have put them elsewhere
                        held = buffers | attributes["_parameters"] | attributes
                        mean, variance, count = (held.get(name) for name in STATISTICS)
                    if mean is None or variance is None or (momentum is None and count is None):
                        if count is not None:  # any buffer may have been set to None
                            count.add_(1)
                        continue
                    running += [mean, variance]
                    counts += [] if count is None else [count]
                    columns += [start, stop]
                    biases.append(None if bias is None else parameters[bias])
                if running:
                    arguments = running, counts, statistics, columns, biases, momentum
                    if torch.compiler.is_compiling() or not are_ordinary(*running, *counts):
                        torch.ops.efficient_densenet.update_running_statistics.default(*arguments)
                    else:
                        _update(*arguments)


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

    Tensors that several norms share are updated for one norm after the other, as plain modules do.

    PyTorch's batch norm leaves the versions of its running statistics as they are, and autograd may have saved them.
    """
    tensors = [*running, *num_batches_tracked]
    if len(biases) > 1 and len(set(map(Tensor.data_ptr, tensors))) < len(tensors):
        for i, bias in enumerate(biases):
            counts = num_batches_tracked[i : i + 1] if momentum is None else []
            _update(running[2 * i : 2 * i + 2], counts, statistics, columns[2 * i : 2 * i + 2], [bias], momentum)
        for count in num_batches_tracked if momentum is not None else ():  # of those norms that have one
            count.add_(1)
        return
    if num_batches_tracked:
        foreach_add_(num_batches_tracked, 1)
    mean, variance, *_ = statistics.unbind()
    batch: list[Tensor] = []
    dtype = statistics.dtype
    for start, stop, bias in zip(columns[::2], columns[1::2], biases, strict=True):
        means = mean[start:stop]
        batch += [means if bias is None else means + bias, variance[start:stop]]
    weight: Any = momentum
    if momentum is None:  # 1 / num_batches_tracked, a weight for each channel, with which all norms are one launch
        weights = torch.stack(num_batches_tracked).to(batch[0].dtype).reciprocal()  # reading numbers would wait
        rows = weights[:, None].repeat(1, max(tensor.shape[0] for tensor in batch)).unbind()
        weight = [rows[i // 2][: tensor.shape[0]] for i, tensor in enumerate(batch)]
    running = [tensor.data for tensor in running]  # with versions of their own
    updated = [as_dtype(tensor, dtype) for tensor in running]
    foreach_lerp_(updated, batch, weight)
    for tensor, value in zip(running, updated, strict=True):
        if tensor is not value:
            tensor.copy_(value)


torch.library.register_fake("efficient_densenet::update_running_statistics", lambda *arguments: None, lib=LIBRARY)
