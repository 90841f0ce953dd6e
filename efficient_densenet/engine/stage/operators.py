"""The stage as PyTorch operators: `efficient_densenet::stage` and `::stage_backward`, with their fake implementations.

Eager code and compilers call the same two; the backward of a large stage alone, which releases its gradients group by
group in eager mode, calls the kernels itself. They change none of their inputs: running statistics are updated outside,
from the statistics that `stage` returns.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._compilers import skipped_by_compilers
from ..._tensors import accumulation_dtype, autocast_disabled
from ...kernels import scratch
from .backward import Backward
from .forward import Forward, StageInputs
from .groups import LayerGroup
from .saved import SavedStage
from .spec import StageSpec, decode, norm_convs

LIBRARY = torch.library.Library("efficient_densenet", "FRAGMENT")

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
    """The stage's outputs, then what `Forward.saved` lists."""
    return torch.ops.efficient_densenet.stage.default(*inputs, spec.encoded)


def stage_backward(
    spec: StageSpec,
    shape: Sequence[int],
    saved: SavedStage,
    grad_consumer: Tensor | None,
    grad_block: Tensor | None,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the stage's input and of each parameter, None where it is not needed."""
    if grad_consumer is None:
        of_layers = 1 + spec.consumer_tensors.start
        needs_grad = [needed and i < of_layers for i, needed in enumerate(needs_grad)]
    arguments = grad_consumer, grad_block, shape, *saved, needs_grad, spec.encoded
    grads = iter(torch.ops.efficient_densenet.stage_backward.default(*arguments))
    return [next(grads) if needed else None for needed in needs_grad]


@torch.library.impl(LIBRARY, "stage", "CompositeExplicitAutograd")
@skipped_by_compilers
def _stage(
    x: Tensor,
    parameters: list[Tensor | None],
    running_statistics: list[Tensor],
    dropout_masks: list[Tensor],
    stored: list[Tensor],
    spec: str,
) -> list[Tensor]:
    with autocast_disabled(x), scratch.reused():
        forward = Forward(decode(spec), StageInputs(x, parameters, running_statistics, dropout_masks, stored))
        outputs = forward.run()
        return [*outputs, *forward.saved()]


@torch.library.impl(LIBRARY, "stage_backward", "CompositeExplicitAutograd")
@skipped_by_compilers
def _stage_backward(
    grad_consumer: Tensor | None,
    grad_block: Tensor | None,
    shape: list[int],
    features: Tensor,
    statistics: Tensor,
    count: Tensor | None,
    bottlenecks: list[Tensor],
    dropout_masks: list[Tensor],
    parameters: list[Tensor | None],
    needs_grad: list[bool],
    spec: str,
) -> list[Tensor]:
    saved = SavedStage(features, statistics, count, bottlenecks, dropout_masks, parameters)
    backward = Backward(decode(spec), torch.Size(shape), saved)
    backward.enter(LayerGroup(range(len(backward.spec.layers)), slice(0, len(parameters))), parameters, needs_grad)
    with autocast_disabled(features), scratch.reused(backward.scratch):
        backward.start(grad_consumer, grad_block)
        grads = [grad.contiguous() for grad in backward.run_group() if grad is not None]
        return [backward.grad_stage_input(), *grads] if needs_grad[0] else grads


@torch.library.register_fake("efficient_densenet::stage", lib=LIBRARY)
def _fake_stage(
    x: Tensor,
    parameters: list[Tensor | None],
    running_statistics: list[Tensor],
    dropout_masks: list[Tensor],
    stored: list[Tensor],
    spec: str,
) -> list[Tensor]:
    settings = decode(spec)
    shape, dtype = (x.shape[0], *x.shape[2:]), accumulation_dtype(x.dtype)
    pixels, outputs = math.prod(shape), []
    if settings.consumer is not None:
        outputs.append(_fake_consumer_output(settings, x, parameters))
    if settings.returns_features:
        outputs.append(_fake_images(settings.memory_format(x), x, settings.num_output_channels, shape, x.dtype))
    computed = [
        x.new_empty(pixels, settings.order.total),
        x.new_empty(3, settings.num_columns, dtype=dtype),
    ][len(stored) :]
    if settings.has_count:
        computed.append(x.new_empty((), dtype=dtype))
    bottlenecks = [
        x.new_empty(pixels, layer.width, dtype=settings.torch_dtype)
        for layer in settings.layers
        if layer.keep_bottleneck
    ]
    return [*outputs, *computed, *bottlenecks]


def _fake_consumer_output(settings: StageSpec, x: Tensor, parameters: list[Tensor | None]) -> Tensor:
    assert settings.consumer is not None
    tensors = norm_convs(parameters)[-1]
    sides, dtype, channels = x.shape[2:], x.dtype, settings.order.total
    if tensors.conv_weight is not None:
        dtype, channels = settings.torch_dtype, tensors.conv_weight.shape[0]
    if settings.consumer.pools:
        sides = [side // 2 for side in sides]
    return _fake_images(settings.consumer_memory_format(x), x, channels, (x.shape[0], *sides), dtype)


def _fake_images(
    memory_format: torch.memory_format, x: Tensor, channels: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    size = shape[0], channels, *shape[1:]
    return torch.empty(size, dtype=dtype, device=x.device, memory_format=memory_format)


@torch.library.register_fake("efficient_densenet::stage_backward", lib=LIBRARY)
def _fake_stage_backward(
    grad_consumer: Tensor | None,
    grad_block: Tensor | None,
    shape: list[int],
    features: Tensor,
    statistics: Tensor,
    count: Tensor | None,
    bottlenecks: list[Tensor],
    dropout_masks: list[Tensor],
    parameters: list[Tensor | None],
    needs_grad: list[bool],
    spec: str,
) -> list[Tensor]:
    needs_grad_input, *needs_grads = needs_grad
    grads = [
        torch.empty_like(parameter, memory_format=torch.contiguous_format)
        for parameter, needed in zip(parameters, needs_grads, strict=True)
        if needed and parameter is not None
    ]
    if not needs_grad_input:
        return grads
    matrix = features.new_empty(features.shape[0], decode(spec).in_channels)
    return [matrix.view(*shape, matrix.shape[1]).movedim(-1, 1), *grads]
