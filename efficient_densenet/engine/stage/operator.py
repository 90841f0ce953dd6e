"""A stage as PyTorch operators, `efficient_densenet::stage` and `::stage_backward`, with their fake implementations.

The operators change none of their inputs: running statistics are updated outside, from the statistics that `stage`
returns.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._tensors import accumulation_dtype, autocast_disabled
from ..._torch_private import below_autograd
from ...kernels import scratch
from ..library import LIBRARY, are_ordinary, implement
from .backward import Backward
from .forward import Forward, StageInputs
from .groups import whole_stage
from .spec import SavedStage, StageSpec, decode, norm_convs

LIBRARY.define(
    "stage(Tensor x, Tensor?[] parameters, Tensor[] running_statistics, Tensor[] dropout_masks, Tensor[] stored, "
    "str spec) -> Tensor[]"
)
LIBRARY.define(
    "stage_backward(Tensor? grad_consumer, Tensor? grad_block, SymInt[] shape, Tensor features, Tensor statistics, "
    "Tensor? count, Tensor[] bottlenecks, Tensor[] dropout_masks, Tensor?[] parameters, bool[] needs_grad, str spec) "
    "-> Tensor[]"
)


def stage(spec: StageSpec, inputs: StageInputs) -> list[Tensor]:
    """The stage's outputs, then the tensors of `Forward.saved`; autograd does not record them."""
    with below_autograd():
        if are_ordinary(inputs.x, *inputs.parameters):
            return run_forward(spec, inputs)
        return torch.ops.efficient_densenet.stage.default(*inputs, spec.encoded)


def stage_backward(
    spec: StageSpec,
    grad_consumer: Tensor | None,
    grad_block: Tensor | None,
    shape: Sequence[int],
    saved: SavedStage,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the stage's input and of each parameter, None where a gradient is not needed."""
    if grad_consumer is None:
        consumer_start = 1 + spec.consumer_tensors.start
        needs_grad = [needed and i < consumer_start for i, needed in enumerate(needs_grad)]
    outputs = grad_consumer, grad_block, shape
    if are_ordinary(grad_consumer, grad_block, saved.features, *saved.parameters):
        grads = iter(run_backward(spec, *outputs, saved, needs_grad))
    else:
        grads = iter(torch.ops.efficient_densenet.stage_backward.default(*outputs, *saved, needs_grad, spec.encoded))
    return [next(grads) if needed else None for needed in needs_grad]


def run_forward(spec: StageSpec, inputs: StageInputs) -> list[Tensor]:
    with autocast_disabled(inputs.x), scratch.reused():
        forward = Forward(spec, inputs)
        outputs = forward.run()
        return [*outputs, *forward.saved()]


def run_backward(
    spec: StageSpec,
    grad_consumer: Tensor | None,
    grad_block: Tensor | None,
    shape: Sequence[int],
    saved: SavedStage,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """The gradients that are needed."""
    backward = Backward(spec, torch.Size(shape), saved)
    backward.enter(whole_stage(spec), saved.parameters, needs_grad)
    with autocast_disabled(backward.features), scratch.reused(backward.scratch):
        backward.start(grad_consumer, grad_block)
        grads = [grad.contiguous() for grad in backward.run_group() if grad is not None]
        return [backward.grad_stage_input(), *grads] if needs_grad[0] else grads


@implement("stage")
def _stage(*arguments: Any) -> list[Tensor]:
    *inputs, text = arguments
    return run_forward(decode(text), StageInputs(*inputs))


@implement("stage_backward")
def _stage_backward(*arguments: Any) -> list[Tensor]:
    grad_consumer, grad_block, shape, *saved, needs_grad, text = arguments
    return run_backward(decode(text), grad_consumer, grad_block, shape, SavedStage(*saved), needs_grad)


@torch.library.register_fake("efficient_densenet::stage", lib=LIBRARY)
def _fake_stage(*arguments: Any) -> list[Tensor]:
    *inputs, text = arguments
    spec, (x, parameters, _, _, stored) = decode(text), StageInputs(*inputs)
    shape, dtype = (x.shape[0], *x.shape[2:]), accumulation_dtype(x.dtype)
    pixels, outputs = math.prod(shape), []
    if spec.consumer is not None:
        outputs.append(_fake_consumer_output(spec, x, parameters))
    if spec.returns_features:
        outputs.append(_fake_images(spec.memory_format(x), x, spec.num_output_channels, shape, x.dtype))
    computed = [x.new_empty(pixels, spec.order.total), x.new_empty(3, spec.num_columns, dtype=dtype)][len(stored) :]
    count = [x.new_empty((), dtype=dtype)] if spec.has_count else []
    bottlenecks = [
        x.new_empty(pixels, layer.width, dtype=spec.torch_dtype) for layer in spec.layers if layer.keep_bottleneck
    ]
    return [*outputs, *computed, *count, *bottlenecks]


def _fake_consumer_output(spec: StageSpec, x: Tensor, parameters: Sequence[Tensor | None]) -> Tensor:
    assert spec.consumer is not None
    tensors = norm_convs(parameters)[-1]
    sides, dtype, channels = x.shape[2:], x.dtype, spec.order.total
    if tensors.conv_weight is not None:
        dtype, channels = spec.torch_dtype, tensors.conv_weight.shape[0]
    if spec.consumer.pools:
        sides = [side // 2 for side in sides]
    return _fake_images(spec.consumer_memory_format(x), x, channels, (x.shape[0], *sides), dtype)


def _fake_images(
    memory_format: torch.memory_format, x: Tensor, channels: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    size = shape[0], channels, *shape[1:]
    return torch.empty(size, dtype=dtype, device=x.device, memory_format=memory_format)


@torch.library.register_fake("efficient_densenet::stage_backward", lib=LIBRARY)
def _fake_stage_backward(*arguments: Any) -> list[Tensor]:
    _, _, shape, *tensors, (needs_grad_input, *needs_grads), text = arguments
    saved = SavedStage(*tensors)
    grads = [
        torch.empty_like(parameter, memory_format=torch.contiguous_format)
        for parameter, needed in zip(saved.parameters, needs_grads, strict=True)
        if needed and parameter is not None
    ]
    if not needs_grad_input:
        return grads
    matrix = saved.features.new_empty(saved.features.shape[0], decode(text).in_channels)
    return [matrix.view(*shape, matrix.shape[1]).movedim(-1, 1), *grads]
