"""The stem as PyTorch operators, `efficient_densenet::stem` and `::stem_backward`, with their fake implementations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._tensors import autocast_disabled, memory_format_of
from ..._torch_private import below_autograd
from ...kernels import scratch
from ..library import LIBRARY, are_ordinary, implement
from .backward import backward
from .forward import Convolved, forward
from .spec import StemSpec, decode

LIBRARY.define(
    "stem(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, Tensor? bias, "
    "Tensor? running_mean, Tensor? running_var, str spec) -> Tensor[]"
)
LIBRARY.define(
    "stem_backward(Tensor grad_output, Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, Tensor? bias, "
    "Tensor statistics, Tensor? count, bool[] needs_grad, str spec) -> Tensor[]"
)


def stem(spec: StemSpec, *tensors: Any) -> list[Tensor]:
    """The stem's output, the matrix of statistics and, in a sync group, the number of values per channel.

    Autograd does not record these operations.
    """
    with below_autograd():
        if are_ordinary(*tensors):
            return run_forward(spec, *tensors)
        return torch.ops.efficient_densenet.stem.default(*tensors, spec.encoded)


def stem_backward(
    spec: StemSpec, grad_output: Tensor, tensors: Sequence[Any], needs_grad: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of x, norm_weight, norm_bias, weight and bias, None where one is not needed.

    `tensors` are these five, the statistics and the count.
    """
    if are_ordinary(grad_output, *tensors):
        grads = iter(run_backward(spec, grad_output, *tensors, needs_grad=needs_grad))
    else:
        operator = torch.ops.efficient_densenet.stem_backward.default
        grads = iter(operator(grad_output, *tensors, needs_grad, spec.encoded))
    return [next(grads) if needed else None for needed in needs_grad]


def run_forward(
    spec: StemSpec,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> list[Tensor]:
    with autocast_disabled(x), scratch.reused():
        convolved = Convolved(spec, x, weight, bias)
        return forward(convolved, norm_weight, norm_bias, running_mean, running_var)


def run_backward(
    spec: StemSpec,
    grad_output: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    count: Tensor | None,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """The gradients that are needed."""
    with autocast_disabled(x), scratch.reused():
        convolved = Convolved(spec, x, weight, bias)
        norm = convolved.norm(norm_weight, norm_bias, statistics)
        grads = backward(convolved, grad_output, norm, count, needs_grad)
    inputs = x, norm_weight, norm_bias, weight, bias
    grad_input, *grads = (
        grad.to(tensor.dtype) if needed and grad is not None and tensor is not None else None
        for grad, tensor, needed in zip(grads, inputs, needs_grad, strict=True)
    )
    contiguous = [grad.contiguous() for grad in grads if grad is not None]
    return contiguous if grad_input is None else [_with_strides_like(x, grad_input), *contiguous]


def _with_strides_like(x: Tensor, grad_input: Tensor) -> Tensor:
    """x's gradient with the strides of `empty_like(x)`, which the fake implementation returns."""
    if grad_input.stride() == torch.empty_like(x, device="meta").stride():
        return grad_input
    return torch.empty_like(x).copy_(grad_input)


@implement("stem")
def _stem(*arguments: Any) -> list[Tensor]:
    *tensors, text = arguments
    return run_forward(decode(text), *tensors)


@implement("stem_backward")
def _stem_backward(*arguments: Any) -> list[Tensor]:
    *tensors, text = arguments
    return run_backward(decode(text), *tensors)


@torch.library.register_fake("efficient_densenet::stem", lib=LIBRARY)
def _fake_stem(*arguments: Any) -> list[Tensor]:
    x, _, _, weight, bias, *_, text = arguments
    spec = decode(text)
    # The memory format of a convolution's output depends on the device's routine, so a fake convolution is run.
    dtype = spec.torch_dtype
    convolved = spec.conv.forward(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    pooled, dtype = spec.pool.forward(convolved)[0].shape, getattr(torch, spec.output_dtype)
    output = torch.empty(pooled, dtype=dtype, device=x.device, memory_format=memory_format_of(convolved))
    statistics = x.new_empty(3, weight.shape[0], dtype=spec.accumulation_dtype)
    return [output, statistics, *([statistics.new_empty(())] if spec.has_count else [])]


@torch.library.register_fake("efficient_densenet::stem_backward", lib=LIBRARY)
def _fake_stem_backward(*arguments: Any) -> list[Tensor]:
    _, x, *parameters, _, _, (needs_grad_input, *needs_grads), _ = arguments
    grads = [
        torch.empty_like(parameter, memory_format=torch.contiguous_format)
        for parameter, needed in zip(parameters, needs_grads, strict=True)
        if needed and parameter is not None
    ]
    return [torch.empty_like(x), *grads] if needs_grad_input else grads
