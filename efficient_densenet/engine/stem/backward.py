"""The backward of a stem, given its recomputed convolution output; the package's docstring has the formulas."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._tensors import as_dtype, memory_format_of
from ...kernels.interface import AffineInput, Gradients
from ...norms.sync_batch_norm import SyncGroup
from .forward import Convolved


def backward(
    convolved: Convolved,
    grad_output: Tensor,
    input: AffineInput,
    count: Tensor | None,
    needs_grad: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, norm.weight, norm.bias, conv.weight and conv.bias.

    `needs_grad` says which of them are needed; `count` is the number of values per channel in a sync group. The
    gradient of the convolution's output is written over the output.
    """
    values, kernels = convolved.values, convolved.kernels
    pool, norm = convolved.spec.pool, input.norm
    grad_output = grad_output.contiguous(memory_format=memory_format_of(values))  # once, for both kernels
    indices, grads = kernels.norm_activation_max_pool_reduce(grad_output, input, pool)
    needs_grad_input, _, _, needs_grad_weight, needs_grad_bias = needs_grad
    grad_input, grad_weight = None, None
    if needs_grad_input or needs_grad_weight:
        sums = grads, convolved.count
        if count is not None:
            sums = _sums_of_processes(grads, count, SyncGroup.named(convolved.spec.sync_group)), 1
        kernels.norm_activation_max_pool_backward(grad_output, indices, input, pool, *sums)
        grad_input, grad_weight = _conv_backward(convolved, needs_grad_input, needs_grad_weight)
    grad_bias = norm.grad_conv_bias(grads.norm_bias) if needs_grad_bias else None
    return grad_input, grads.norm_weight, grads.norm_bias, grad_weight, grad_bias


def _sums_of_processes(grads: Gradients, count: Tensor, sync_group: SyncGroup | None) -> Gradients:
    """The norm's gradients, summed over all processes of the sync group and divided by `count`."""
    assert sync_group is not None  # only a sync group has a count
    return Gradients(*(total / count for total in sync_group.sums(grads.norm_weight, grads.norm_bias)))


def _conv_backward(
    convolved: Convolved, needs_grad_input: bool, needs_grad_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """grad_input and grad_weight of the convolution, for as many images at a time as in its forward, in its dtype."""
    x, tiles, output_mask = convolved.x, convolved.image_tiles, [needs_grad_input, needs_grad_weight, False]
    grad_input = torch.empty_like(x) if needs_grad_input and len(tiles) > 1 else None
    grad_weight = None
    for images in tiles:
        grad_output, part = (as_dtype(each[images], convolved.conv_dtype) for each in (convolved.values, x))
        grad_of_images, partial, _ = convolved.spec.conv.backward(grad_output, part, convolved.weight, output_mask)
        if grad_input is not None and grad_of_images is not None:
            grad_input[images] = grad_of_images
        elif grad_of_images is not None:
            grad_input = as_dtype(grad_of_images, x.dtype)
        if partial is not None:
            partial = as_dtype(partial, convolved.spec.accumulation_dtype)
            grad_weight = partial if grad_weight is None else grad_weight.add_(partial)
    return grad_input, grad_weight
