"""The autograd formula of a stem, for eager mode and, as the operator's implementation for autograd, for compilers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._compilers import skipped_by_compilers
from ..._tensors import autocast_disabled
from ..library import implement, needs_graph, refuse_batched_gradients, refuse_synchronized, run_operator
from ..parts import Norm
from ..stage.running_statistics import NormUpdate, update_running_statistics
from ..stage.second_order import differentiable_gradients, plain_norm
from . import operator
from .spec import StemSpec, decode


def apply(
    spec: StemSpec,
    norm: Norm,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """The stem's output, with the parameters of `norm` and of the convolution."""
    running = (norm.running_mean, norm.running_var) if spec.frozen else (None, None)
    tensors = x, norm_weight, norm_bias, weight, bias, *running
    output, statistics, *_ = run_operator("stem", stem, spec, tensors)
    if not spec.frozen:
        update_running_statistics([NormUpdate(norm, slice(0, statistics.shape[1]))], statistics)
    return output


@skipped_by_compilers
def stem(spec: StemSpec, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The stem's output, the matrix of statistics and, in a sync group, the number of values per channel."""
    return list(SharedStem.apply(spec, *tensors)) if needs_graph(*tensors) else operator.stem(spec, *tensors)


@implement("stem", "Autograd")
def _stem(*arguments: Any) -> list[Tensor]:
    *tensors, text = arguments
    return stem(decode(text), tensors)


class SharedStem(torch.autograd.Function):
    """The stem as an autograd node. Of the operator's results, only the first, the output, is differentiable."""

    @staticmethod
    def forward(ctx: Any, spec: StemSpec, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        output, statistics, *count = operator.stem(spec, *tensors)
        ctx.spec = spec
        ctx.save_for_backward(*tensors[:5], statistics, *(count or [None]))
        ctx.mark_non_differentiable(statistics, *count)
        ctx.set_materialize_grads(False)
        return output, statistics, *count

    @staticmethod
    @skipped_by_compilers
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_output, *_ = grad_outputs
        refuse_batched_gradients(grad_output)
        if grad_output is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            refuse_synchronized(ctx.spec.has_count)
            *tensors, statistics, _ = ctx.saved_tensors
            function = partial(plain_stem, ctx.spec, statistics)
            with autocast_disabled(statistics):
                return None, *differentiable_gradients(function, tensors, [grad_output]), None, None
        needs_grad = ctx.needs_input_grad[1:6]
        return None, *operator.stem_backward(ctx.spec, grad_output, ctx.saved_tensors, needs_grad), None, None


def plain_stem(
    spec: StemSpec,
    statistics: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> list[Tensor]:
    """The stem's output, by functions that autograd can differentiate any number of times."""
    dtype = spec.torch_dtype
    x = spec.conv.forward(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    x = plain_norm(x, norm_weight, norm_bias, spec.eps, statistics if spec.frozen else None)
    x = spec.activation.forward(x)
    return [spec.pool.forward(x)[0].to(getattr(torch, spec.output_dtype))]
