"""The autograd formula of a stage, for eager mode and, as the operator's implementation for autograd, for compilers.

One node runs the whole forward; the backward of a large stage is split into one node for each layer group, which
releases the group's gradients before the gradients of earlier layers exist. Parameters are inputs of the nodes, so that
replicas and gathered parameters get their gradients.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..._compilers import skipped_by_compilers
from ..._tensors import autocast_disabled
from ..library import implement, needs_graph, refuse_batched_gradients, refuse_synchronized
from . import operator, second_order
from .backward import Backward
from .forward import StageInputs
from .groups import (
    EarlierLayers,
    Handoff,
    Handoffs,
    LayerGroup,
    StageGradients,
    add,
    layer_groups,
    release,
    run_group,
    whole_stage,
)
from .spec import SavedStage, StageSpec, decode


@skipped_by_compilers
def stage(spec: StageSpec, inputs: StageInputs) -> list[Tensor]:
    """The stage's outputs, then the tensors of `Forward.saved`."""
    x, parameters = inputs.x, inputs.parameters
    if not needs_graph(x, *parameters):
        return operator.stage(spec, inputs)
    before, handoffs, (*earlier, last) = x, Handoffs(Handoff(), Handoff()), _groups(spec, x, parameters)
    for group in earlier:
        before = EarlierLayers.apply(group, handoffs, before, *parameters[group.tensors])
    inputs = inputs._replace(x=x.detach())
    *results, _ = SharedStage.apply(spec, handoffs, inputs, (*earlier, last), before, *parameters[last.tensors])
    return results


def _groups(spec: StageSpec, x: Tensor, parameters: Sequence[Tensor | None]) -> list[LayerGroup]:
    """The layer groups of a stage: one under a compiler, whose backward returns all gradients at its end."""
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return layer_groups(spec, parameters)
    return [whole_stage(spec)]


@implement("stage", "Autograd")
def _stage(*arguments: Any) -> list[Tensor]:
    *inputs, text = arguments
    return stage(decode(text), StageInputs(*inputs))


class SharedStage(torch.autograd.Function):
    """All of a stage's forward, and the backward of its consumer and its last layer group.

    `before` is the stage's input, or a scalar, the output of the last earlier layer group's node. It only connects the
    nodes in the graph, so that autograd runs the earlier nodes after this one. The forward returns all results of the
    operator, and the `anchor`, a scalar output that connects `second_order` to this node.
    """

    @staticmethod
    def forward(
        ctx: Any,
        spec: StageSpec,
        handoffs: Handoffs,
        inputs: StageInputs,
        groups: Sequence[LayerGroup],
        before: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        results = operator.stage(spec, inputs)
        outputs, computed = results[: spec.num_outputs], results[spec.num_outputs :]
        saved = [*inputs.stored, *computed, *inputs.dropout_masks, *inputs.parameters]
        features, statistics, *_ = saved
        if spec.consumer is None and not spec.new_features_only and type(outputs[0]) is Tensor:
            ctx.block_features = BlockFeatures(spec, outputs[0], features, statistics)
        ctx.spec, ctx.handoffs, ctx.groups, ctx.device = spec, handoffs, groups, inputs.x.device
        ctx.shape = torch.Size([inputs.x.shape[0], *inputs.x.shape[2:]])
        anchor = statistics.new_zeros(())
        ctx.save_for_backward(anchor, *saved)
        ctx.mark_non_differentiable(*computed)
        ctx.set_materialize_grads(False)
        return *results, anchor

    @staticmethod
    @skipped_by_compilers
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched_gradients(*grad_outputs)
        spec: StageSpec = ctx.spec
        grad_outputs, grad_input = grad_outputs[: spec.num_outputs], ctx.handoffs.grad_input.take()
        if all(grad is None for grad in grad_outputs):
            gradients = StageGradients(grad_input, [None] * spec.num_tensors)
        elif torch.is_grad_enabled():
            gradients = _differentiable_gradients(ctx, grad_outputs, grad_input)
        elif len(ctx.groups) == 1:
            gradients = _gradients(ctx, grad_outputs, grad_input)
        else:
            return None, None, None, None, *_last_group(ctx, grad_outputs, grad_input)
        return None, None, None, None, *release(ctx.groups[-1], gradients, ctx.handoffs, ctx.device)


def _gradients(ctx: Any, grad_outputs: Sequence[Tensor | None], grad_input: Tensor | None) -> StageGradients:
    """All gradients at once."""
    _, *tensors = ctx.saved_tensors
    saved, by_output = SavedStage.of(ctx.spec, tensors), _by_consumer_and_block(ctx.spec, grad_outputs)
    grad, *grads = operator.stage_backward(ctx.spec, *by_output, ctx.shape, saved, ctx.needs_input_grad[4:])
    return StageGradients(add(grad, grad_input), grads)


def _differentiable_gradients(
    ctx: Any, grad_outputs: Sequence[Tensor | None], grad_input: Tensor | None
) -> StageGradients:
    """The gradients under create_graph=True."""
    spec, (anchor, *tensors) = ctx.spec, ctx.saved_tensors
    refuse_synchronized(spec.has_count)
    saved = SavedStage.of(spec, tensors)
    x = second_order.stage_input(spec, ctx.shape, saved)
    if ctx.needs_input_grad[4]:
        x = second_order.Reconnected.apply(anchor, x, ctx.handoffs.grad_input)
    function = partial(second_order.plain_stage, spec, saved)
    with autocast_disabled(x):
        grad, *grads = second_order.differentiable_gradients(function, [x, *saved.parameters], grad_outputs)
    return StageGradients(add(grad, grad_input), grads)


def _last_group(ctx: Any, grad_outputs: Sequence[Tensor | None], grad_input: Tensor | None) -> list[Tensor | None]:
    """The gradients of the last layer group, with which the backward starts."""
    (_, *tensors), last = ctx.saved_tensors, ctx.groups[-1]
    saved = SavedStage.of(ctx.spec, tensors)
    backward = Backward(ctx.spec, ctx.shape, saved, grad_input)
    grads = _by_consumer_and_block(ctx.spec, grad_outputs)
    return run_group(ctx, last, backward, saved.parameters[last.tensors], ctx.needs_input_grad[4:], grads)


def _by_consumer_and_block(
    spec: StageSpec, grad_outputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the consumer's output and of the block's output."""
    grads = list(grad_outputs)
    grad_consumer = None if spec.consumer is None else grads.pop(0)
    return grad_consumer, grads.pop() if grads else None


class BlockFeatures:
    """The features of a block without a consumer, and their statistics, as attributes of the block's node.

    A model may call a block and the transition after it separately. The transition then uses the block's features and
    statistics, which are stored only once. The reference to the features is weak: they live exactly as long as they are
    saved for the block's backward, and are never packed or copied for the consumer.
    """

    def __init__(self, spec: StageSpec, output: Tensor, features: Tensor, statistics: Tensor) -> None:
        self.spec, self.version, self.address = spec, output._version, output.data_ptr()
        self.features, self.statistics = TensorWeakRef(features), statistics


def stored_features(x: Tensor, spec: StageSpec) -> list[Tensor]:
    """The stored features of the block whose output is x and, unless the norms are frozen, their statistics.

    The list is empty if x is not a block's output or was changed, if the features do not exist any more, or if the
    consumer with this specification does not normalize as the layers of the block do.
    """
    block = getattr(x.grad_fn, "block_features", None)  # no other node has it, as after an in-place operation
    if not isinstance(block, BlockFeatures) or spec.has_count:
        return []
    if block.version != x._version or block.address != x.data_ptr():  # it was changed, or its `.data` replaced
        return []
    features, settings = block.features(), (spec.frozen, spec.eps, spec.sync_group)
    if features is None or settings != (block.spec.frozen, block.spec.eps, block.spec.sync_group):
        return []
    return [features] if spec.frozen else [features, block.statistics[:, : features.shape[1]]]
