"""The autograd Function of a stem."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compilers import skipped_by_compilers
from ..._tensors import autocast_disabled
from ..._torch_private import below_autograd
from ..parts import Norm
from ..stage.function import refuse_batched_gradients, refuse_synchronized
from ..stage.operators import LIBRARY
from ..stage.running_statistics import NormUpdate, update_running_statistics
from ..stage.second_order import differentiable_gradients, plain_norm
from . import operators
from .plan import StemSpec, decode


def apply(spec: StemSpec, norm: Norm, x: Tensor, *tensors: Tensor | None) -> Tensor:
    """The stem's output, with `tensors` as norm.weight, norm.bias, conv.weight and conv.bias."""
    running = (norm.running_mean, norm.running_var) if spec.frozen else (None, None)
    output, statistics, *_ = operators.stem(spec, x, *tensors, *running)
    if not spec.frozen:
        update_running_statistics([NormUpdate(norm, slice(0, statistics.shape[1]))], statistics)
    return output


@torch.library.impl(LIBRARY, "stem", "Autograd")
@skipped_by_compilers
def _differentiable_stem(*arguments: Any) -> list[Tensor]:
    """The operator on tensors that may require gradients: it adds a node to the autograd graph."""
    *tensors, text = arguments
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return list(SharedStem.apply(decode(text), *tensors))
    with below_autograd():
        return operators.stem(decode(text), *tensors)


class SharedStem(torch.autograd.Function):
    """All results of the operator, of which the first is differentiable."""

    @staticmethod
    def forward(ctx: Any, spec: StemSpec, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with below_autograd():
            output, statistics, *count = operators.stem(spec, *tensors)
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
        return None, *operators.stem_backward(ctx.spec, grad_output, ctx.saved_tensors, needs_grad), None, None


def plain_stem(
    spec: StemSpec,
    statistics: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> list[Tensor]:
    """The stem's output, by functions that autograd can differentiate again and again."""
    dtype = spec.torch_dtype
    x = spec.conv.forward(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    x = plain_norm(x, norm_weight, norm_bias, spec.eps, statistics if spec.frozen else None)
    return [spec.pool.forward(F.relu(x))[0].to(getattr(torch, spec.output_dtype))]
