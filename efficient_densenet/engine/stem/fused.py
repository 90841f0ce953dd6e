"""The stem on an NVIDIA GPU: cuDNN's convolutions of whole batches, and a few Triton kernels between them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import kernels
from ..._tensors import memory_format_of
from ...kernels.interface import INV_STD, MEAN, VARIANCE, BatchNormAffine, Gradients, StatisticsOutput
from ...norms.sync_batch_norm import SyncGroup
from ..refuse import convolved_size
from ..stage.synchronized import synchronize_statistics
from .forward import running_statistics
from .spec import StemSpec

MAX_WINDOW = 25
"""The largest pooling window, in pixels: the kernels unroll it, and store a place in it in int8."""


def can_fuse(spec: StemSpec, x: Tensor, weight: Tensor) -> bool:
    """Whether the Triton kernels can run this stem: there is a pixel, and numbers of rows and offsets fit int32."""
    if x.dim() != 4 or spec.accumulation_dtype != torch.float32 or not kernels.triton_supports(x):
        return False
    if math.prod(spec.pool.kernel_size) > MAX_WINDOW or max(spec.pool.dilation) > 1:
        return False
    size = convolved_size(x.shape[2:], weight.shape[2:], *spec.conv[:3])
    is_empty = min(len(x), *size, *spec.pool.pooled_size(size)) < 1
    return not is_empty and size.numel() * max(len(x), len(weight)) < 1 << 31


class FusedStem:
    """z = conv(x), recomputed in the backward, and what follows from it."""

    def __init__(self, spec: StemSpec, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        from ...kernels.triton_gpu.host import stem as triton_stem

        self.kernels, self.spec = triton_stem, spec
        self.x, self.weight = x.to(spec.torch_dtype), weight.to(spec.torch_dtype)
        values = spec.conv.forward(self.x, self.weight, None if bias is None else bias.to(spec.torch_dtype))
        self.memory_format = memory_format_of(values)
        self.values = values.contiguous(memory_format=self.memory_format)
        size, pool = self.values.shape[2:], spec.pool
        self.pool = triton_stem.Pooling(pool.kernel_size, pool.stride, pool.padding, pool.pooled_size(size))
        self.count = self.values.numel() // self.values.shape[1]

    def forward(self, norm: tuple[Tensor, Tensor], running: tuple[Tensor, Tensor] | None) -> list[Tensor]:
        """The output, the matrix of statistics and, in a sync group, the number of values per channel.

        `norm` are its parameters, and `running` its running statistics where it is frozen.
        """
        spec, count = self.spec, self.count
        matrix = self.values.new_empty(3, len(self.weight), dtype=spec.accumulation_dtype)
        if running is None:
            statistics = StatisticsOutput(matrix, spec.eps)
            self.kernels.batch_statistics(self.values, statistics)
            count = synchronize_statistics(statistics, count, SyncGroup.named(spec.sync_group))
            matrix[VARIANCE].mul_(count / (count - 1))
        else:
            mean, inv_std = running_statistics(spec, *running)
            torch.stack([mean, torch.zeros_like(mean), inv_std], out=matrix)
        dtype, affine = getattr(torch, spec.output_dtype), self._affine(norm, matrix)
        output = self.kernels.norm_relu_max_pool(self.values, affine, self.pool, dtype)
        return [output, matrix, *([count] if isinstance(count, Tensor) else [])]

    def backward(
        self,
        grad_output: Tensor,
        norm: tuple[Tensor, Tensor],
        statistics: Tensor,
        count: Tensor | None,
        needs_grad: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x and of each parameter; `needs_grad` is of x, the norm's two and the convolution's.

        z's own gradient is written over it.
        """
        needs_grad_input, _, _, needs_grad_weight, *needs_grad_bias = needs_grad
        affine, values, spec = self._affine(norm, statistics), self.values, self.spec
        grad_output = grad_output.contiguous(memory_format=self.memory_format)
        indices, norm_grads = self.kernels.norm_gradients(grad_output, values, affine, self.pool)
        grads: list[Tensor | None] = [None, None]
        if needs_grad_input or needs_grad_weight:
            sums = None if spec.frozen else self._sums(norm_grads, count)
            self.kernels.write_grad_input(grad_output, indices, values, affine, self.pool, sums)
            *grads, _ = spec.conv.backward(values, self.x, self.weight, [needs_grad_input, needs_grad_weight, False])
        conv_bias_grads = [affine.grad_conv_bias(norm_grads.norm_bias) for needed in needs_grad_bias if needed]
        return grads[0], *norm_grads[:2], grads[1], *conv_bias_grads

    def _sums(self, norm: Gradients, count: Tensor | None) -> tuple[Tensor, Tensor, float]:
        """The norm's grad_weight and grad_bias over all processes, and by what they are multiplied to be means."""
        group = SyncGroup.named(self.spec.sync_group)
        if group is None or count is None:
            return norm.norm_weight, norm.norm_bias, 1 / self.count
        grad_weight, grad_bias = (total / count for total in group.sums(norm.norm_weight, norm.norm_bias))
        return grad_weight, grad_bias, 1.0

    def _affine(self, norm: tuple[Tensor, Tensor], statistics: Tensor) -> BatchNormAffine:
        return BatchNormAffine(*norm, statistics[INV_STD], statistics[MEAN], self.spec.frozen)
