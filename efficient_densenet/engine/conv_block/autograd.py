"""The autograd formula of a dense block without norms, for eager mode and, as the operator's implementation for
autograd, for compilers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._compilers import skipped_by_compilers
from ..._dimensions import dimensions_of
from ..._tensors import autocast_disabled
from ...kernels.portable import to_spatial
from ..library import implement, needs_graph, refuse_batched_gradients
from ..stage.groups import Handoff, add
from ..stage.second_order import Reconnected, differentiable_gradients
from . import operator
from .compute import SavedBlock
from .padded import pad
from .spec import ConvBlockSpec, ConvSpec, ConvTensors, conv_tensors, decode


@skipped_by_compilers
def conv_block(spec: ConvBlockSpec, tensors: Sequence[Any]) -> list[Tensor]:
    """The block's outputs, then the tensors of `SavedBlock` but the parameters."""
    x, parameters = tensors
    if not needs_graph(x, *parameters):
        return operator.conv_block(spec, x, parameters)
    *results, _ = SharedConvBlock.apply(spec, Handoff(), x, *parameters)
    return results


@implement("conv_block", "Autograd")
def _conv_block(x: Tensor, parameters: Any, text: str) -> list[Tensor]:
    return conv_block(decode(text), (x, parameters))


class SharedConvBlock(torch.autograd.Function):
    """The block as an autograd node. The `anchor`, a scalar output, connects second derivatives to it."""

    @staticmethod
    def forward(
        ctx: Any, spec: ConvBlockSpec, handoff: Handoff[Tensor], x: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        results = operator.conv_block(spec, x, parameters)
        computed = results[spec.num_outputs :]
        ctx.spec, ctx.handoff, ctx.num_computed, ctx.dtype = spec, handoff, len(computed), x.dtype
        ctx.shape = torch.Size([x.shape[0], *x.shape[2:]])
        anchor = computed[0].new_zeros(())
        ctx.save_for_backward(anchor, *computed, *parameters)
        ctx.mark_non_differentiable(*computed)
        ctx.set_materialize_grads(False)
        return *results, anchor

    @staticmethod
    @skipped_by_compilers
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched_gradients(*grad_outputs)
        spec, other_grad_input = ctx.spec, ctx.handoff.take()
        grad_outputs = grad_outputs[: spec.num_outputs]
        anchor, *tensors = ctx.saved_tensors
        features, *values_before = tensors[: ctx.num_computed]
        saved = SavedBlock(features, values_before, tensors[ctx.num_computed :])
        if all(grad is None for grad in grad_outputs):
            return None, None, other_grad_input, *[None] * len(saved.parameters)
        if torch.is_grad_enabled():
            grad, *grads = _differentiable_gradients(ctx, anchor, saved, grad_outputs)
        else:
            both = _last_and_features(spec, list(grad_outputs))
            grad, *grads = operator.conv_block_backward(spec, both, ctx.shape, saved, ctx.needs_input_grad[2:])
            grad = None if grad is None else grad.to(ctx.dtype)
        return None, None, add(grad, other_grad_input), *grads


def _last_and_features(spec: ConvBlockSpec, grads: list[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the last convolution's output and of the features."""
    grad_last = None if spec.last is None else grads.pop(0)
    return grad_last, grads.pop() if grads else None


def _differentiable_gradients(
    ctx: Any, anchor: Tensor, saved: SavedBlock, grad_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients under create_graph=True."""
    x = to_spatial(saved.features[:, ctx.spec.columns_read(0)], ctx.shape).to(ctx.dtype)
    if ctx.needs_input_grad[2]:
        x = Reconnected.apply(anchor, x, ctx.handoff)
    with autocast_disabled(x):
        return differentiable_gradients(partial(plain_conv_block, ctx.spec), [x, *saved.parameters], grad_outputs)


def plain_conv_block(spec: ConvBlockSpec, x: Tensor, *parameters: Tensor | None) -> list[Tensor]:
    """The outputs of a block, by functions that autograd can differentiate any number of times."""
    features, tensors = x, conv_tensors(parameters)
    for layer, each in zip(spec.layers, tensors, strict=False):
        new = layer.activation.forward(_convolve(spec, layer, each, features))
        features = torch.cat([new, features] if spec.newest_first else [features, new], 1)
    outputs = [] if spec.last is None else [_convolve(spec, spec.last, tensors[-1], features)]
    return [*outputs, features[:, spec.columns_returned]] if spec.returns_features else outputs


def _convolve(spec: ConvBlockSpec, conv: ConvSpec, tensors: ConvTensors, x: Tensor) -> Tensor:
    dtype, padding = spec.torch_dtype, conv.kernel_size // 2 * conv.dilation
    bias = None if tensors.bias is None else tensors.bias.to(dtype)
    x, convolve = x.to(dtype), dimensions_of(x).conv
    if conv.padding_mode != "zeros":
        x, padding = pad(x, conv.dilation, conv.padding_mode), 0
    return convolve(x, tensors.weight.to(dtype), bias, padding=padding, dilation=conv.dilation)
