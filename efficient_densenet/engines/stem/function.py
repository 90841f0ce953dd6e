"""The autograd Function of a stem."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import scratch
from ..precision import autocast_disabled
from ..shared.batch_norm import BatchNormAffine
from ..shared.function import refuse_other_backwards
from .backward import StemBackward
from .conv_output import ConvOutput
from .forward import batch_statistics, pooled_output
from .plan import StemPlan


class Parameters(NamedTuple):
    """The stem's parameters, in the order in which the Function takes them."""

    norm_weight: Tensor
    norm_bias: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def norm(self, inv_std: Tensor) -> BatchNormAffine:
        return BatchNormAffine(self.norm_weight, self.norm_bias, inv_std)


class SharedStem(torch.autograd.Function):
    """`apply(plan, x, norm.weight, norm.bias, conv.weight)`, with conv.bias last if there is one."""

    @staticmethod
    def forward(ctx: Any, plan: StemPlan, x: Tensor, *tensors: Tensor) -> Tensor:
        parameters = Parameters(*tensors)
        with autocast_disabled(x), scratch.reused():
            conv_output = ConvOutput(plan, x, parameters.weight, parameters.bias)
            mean, inv_std, ctx.count = batch_statistics(conv_output)
            output = pooled_output(conv_output, mean, parameters.norm(inv_std))
        ctx.plan = plan
        ctx.save_for_backward(x, mean, inv_std, *tensors)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_other_backwards(grad_output)
        needs_grad = ctx.needs_input_grad[1:]
        if grad_output is None:
            return None, *[None] * len(needs_grad)
        x, mean, inv_std, *tensors = ctx.saved_tensors
        parameters = Parameters(*tensors)
        with autocast_disabled(x), scratch.reused():
            conv_output = ConvOutput(ctx.plan, x, parameters.weight, parameters.bias)
            grads = StemBackward(conv_output, mean, parameters.norm(inv_std), ctx.count, needs_grad).run(grad_output)
        inputs = zip(grads, (x, *tensors), needs_grad, strict=True)
        return None, *(grad.to(input.dtype) if needed and grad is not None else None for grad, input, needed in inputs)
