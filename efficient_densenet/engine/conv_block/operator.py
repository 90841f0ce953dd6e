"""A dense block without norms as PyTorch operators, `efficient_densenet::conv_block` and `::conv_block_backward`, with
their fake implementations."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._tensors import autocast_disabled
from ..._torch_private import below_autograd
from ...kernels import scratch
from ..library import LIBRARY, are_ordinary, implement
from .compute import Backward, SavedBlock, empty_features, empty_images, forward
from .spec import ConvBlockSpec, decode

LIBRARY.define("conv_block(Tensor x, Tensor?[] parameters, str spec) -> Tensor[]")
LIBRARY.define(
    "conv_block_backward(Tensor? grad_last, Tensor? grad_features, SymInt[] shape, Tensor features, "
    "Tensor[] values_before, Tensor?[] parameters, bool[] needs_grad, str spec) -> Tensor[]"
)


def conv_block(spec: ConvBlockSpec, x: Tensor, parameters: Sequence[Tensor | None]) -> list[Tensor]:
    """The block's outputs, then the tensors of `SavedBlock` but the parameters; autograd does not record them."""
    with below_autograd():
        if are_ordinary(x, *parameters):
            return run_forward(spec, x, parameters)
        return torch.ops.efficient_densenet.conv_block.default(x, parameters, spec.encoded)


def conv_block_backward(
    spec: ConvBlockSpec,
    grad_outputs: tuple[Tensor | None, Tensor | None],
    shape: Sequence[int],
    saved: SavedBlock,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the block's input and of each parameter, None where a gradient is not needed."""
    if grad_outputs[0] is None and spec.last is not None:  # the last convolution's parameters get none
        needs_grad = [*needs_grad[:-2], False, False]
    if are_ordinary(*grad_outputs, saved.features, *saved.parameters):
        grads = iter(run_backward(spec, grad_outputs, shape, saved, needs_grad))
    else:
        operator = torch.ops.efficient_densenet.conv_block_backward.default
        grads = iter(operator(*grad_outputs, shape, *saved, needs_grad, spec.encoded))
    return [next(grads) if needed else None for needed in needs_grad]


def run_forward(spec: ConvBlockSpec, x: Tensor, parameters: Sequence[Tensor | None]) -> list[Tensor]:
    with autocast_disabled(x), scratch.reused():
        return forward(spec, x, parameters)


def run_backward(
    spec: ConvBlockSpec,
    grad_outputs: tuple[Tensor | None, Tensor | None],
    shape: Sequence[int],
    saved: SavedBlock,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """The gradients that are needed."""
    with autocast_disabled(saved.features), scratch.reused():
        grad_input, grads = Backward(spec, torch.Size(shape), saved, needs_grad).run(*grad_outputs)
    needed = [grad for grad, needed in zip([grad_input, *grads], needs_grad, strict=True) if needed]
    return [grad for grad in needed if grad is not None]


@implement("conv_block")
def _conv_block(x: Tensor, parameters: Any, text: str) -> list[Tensor]:
    return run_forward(decode(text), x, parameters)


@implement("conv_block_backward")
def _conv_block_backward(*arguments: Any) -> list[Tensor]:
    grad_last, grad_features, shape, *saved, needs_grad, text = arguments
    return run_backward(decode(text), (grad_last, grad_features), shape, SavedBlock(*saved), needs_grad)


@torch.library.register_fake("efficient_densenet::conv_block", lib=LIBRARY)
def _fake_conv_block(x: Tensor, parameters: Any, text: str) -> list[Tensor]:
    spec, outputs = decode(text), []
    dtype, pixels = spec.torch_dtype, math.prod((x.shape[0], *x.shape[2:]))
    if spec.last is not None:
        outputs.append(empty_images(x, spec.last.out_channels, spec.last_channels_last, dtype))
    if spec.returns_features:
        outputs.append(empty_features(spec, x))
    stored = [layer.out_channels for layer in spec.layers if not layer.activation.is_known_from_output]
    return [*outputs, *(x.new_empty(pixels, channels, dtype=dtype) for channels in (spec.order.total, *stored))]


@torch.library.register_fake("efficient_densenet::conv_block_backward", lib=LIBRARY)
def _fake_conv_block_backward(*arguments: Any) -> list[Tensor]:
    _, _, shape, features, _, parameters, (needs_grad_input, *needs_grads), text = arguments
    grads = [
        torch.empty_like(parameter, memory_format=torch.contiguous_format)
        for parameter, needed in zip(parameters, needs_grads, strict=True)
        if needed and parameter is not None
    ]
    if not needs_grad_input:
        return grads
    matrix = features.new_empty(features.shape[0], decode(text).in_channels)
    return [matrix.view(*shape, matrix.shape[1]).movedim(-1, 1), *grads]
