"""The autograd nodes of a stage: one for all of its forward, whose backward may be split into one a layer group.

A large stage's gradients are thereby released group by group, from the last layers to the first, before those of the
first layers exist. Parameters are inputs of the nodes, so that replicas and gathered parameters get their gradients.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compilers import skipped_by_compilers
from ..._tensors import autocast_disabled
from ..._torch_private import below_autograd, is_batched_gradient, will_execute
from ...kernels import scratch
from ..parts import BlockParts, ConsumerParts
from . import operators, second_order
from .backward import Backward
from .forward import StageInputs
from .groups import LayerGroup, layer_groups
from .handoff import Handoff
from .read_spec import StagePlan
from .running_statistics import update_running_statistics
from .saved import SavedStage
from .spec import StageSpec, decode
from .stored_features import StoredFeatures, stored_features


def run(
    block: BlockParts,
    x: Tensor,
    consumer: ConsumerParts | None = None,
    memory_format: torch.memory_format | None = None,
    keeps_channels_last: bool = False,
) -> Tensor:
    """The output of a block, or of `consumer` (a transition or a norm) on it.

    It has the memory format that is given, or x's. With `keeps_channels_last`, for an output that only another stage
    reads, it stays in channels_last, in which it is computed.
    """
    plan = StagePlan(block, consumer, x, memory_format=memory_format, keeps_channels_last=keeps_channels_last)
    return plan.finish(apply(plan, x, *plan.tensors)[0])


def run_with_features(block: BlockParts, x: Tensor, consumer: ConsumerParts) -> tuple[Tensor, Tensor]:
    """The output of `consumer` on the output of a block, and the block's too."""
    plan = StagePlan(block, consumer, x, return_features=True)
    output, features = apply(plan, x, *plan.tensors)
    return plan.finish(output), features


def run_consumer(consumer: ConsumerParts, x: Tensor) -> Tensor:
    """The output of `consumer` on x, which may be any tensor; a block's own output need not be stored again."""
    plan = StagePlan(BlockParts(()), consumer, x)
    return plan.finish(apply(plan, x, *plan.tensors, stored=stored_features(x, plan.spec))[0])


def apply(plan: StagePlan, x: Tensor, *tensors: Tensor | None, stored: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """The consumer's output, the block's, or both, with `tensors` as the values of the plan's parameters."""
    inputs = StageInputs(x, tensors, plan.running_statistics, plan.dropout_masks(x), stored)
    results = operators.stage(plan.spec, inputs)
    count = plan.spec.num_outputs
    if plan.updates:
        update_running_statistics(plan.updates, [*stored, *results[count:]][1])
    return tuple(results[:count])


@torch.library.impl(operators.LIBRARY, "stage", "Autograd")
@skipped_by_compilers
def _differentiable_stage(
    x: Tensor,
    parameters: Sequence[Tensor | None],
    running_statistics: Sequence[Tensor],
    dropout_masks: Sequence[Tensor],
    stored: Sequence[Tensor],
    text: str,
) -> list[Tensor]:
    """The operator on tensors that may require gradients: it adds the nodes to the autograd graph."""
    spec, inputs = decode(text), StageInputs(x, parameters, running_statistics, dropout_masks, stored)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in (x, *parameters)):
        with below_autograd():
            return operators.stage(spec, inputs)
    before, handoffs, (*earlier, last) = x, Handoffs(Handoff(), Handoff()), _groups(spec, x, parameters)
    for group in earlier:
        before = EarlierLayers.apply(group, handoffs, before, *parameters[group.tensors])
    inputs = inputs._replace(x=x.detach(), parameters=parameters)
    *results, _ = SharedStage.apply(spec, handoffs, inputs, (*earlier, last), before, *parameters[last.tensors])
    return results


def _groups(spec: StageSpec, x: Tensor, parameters: Sequence[Tensor | None]) -> list[LayerGroup]:
    """A compiled backward returns all gradients at its end, so a compiler's tensors make one group."""
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return layer_groups(spec, parameters)
    return [LayerGroup(range(len(spec.layers)), slice(0, len(parameters)))]


class Handoffs(NamedTuple):
    """What the nodes of a stage hand on: from a layer group to the group before it, and from `Reconnected`."""

    to_earlier: Handoff["Backward | Gradients"]
    of_input: Handoff[Tensor]


class Gradients(NamedTuple):
    """The gradients of the stage's input and of its parameters, where they have all been computed at once."""

    input: Tensor | None
    parameters: Sequence[Tensor | None]


class SharedStage(torch.autograd.Function):
    """All of a stage's forward, and the backward of its consumer and its last layer group.

    `before` is the stage's input, or a scalar that stands for the earlier layer groups: only its place in the graph
    counts, since autograd then runs their nodes after this one. It returns all results of the operator, and a scalar
    that has its own place in the graph: see `second_order`.
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
        with below_autograd():
            results = operators.stage(spec, inputs)
        outputs, computed = results[: spec.num_outputs], results[spec.num_outputs :]
        saved = SavedStage.of(spec, [*inputs.stored, *computed], inputs.dropout_masks, inputs.parameters)
        if spec.consumer is None and not spec.new_features_only and type(outputs[0]) is Tensor:
            ctx.stored_features = StoredFeatures(spec, outputs[0], saved.features, saved.statistics)
        ctx.spec, ctx.handoffs, ctx.groups, ctx.device = spec, handoffs, groups, inputs.x.device
        ctx.shape = torch.Size([inputs.x.shape[0], *inputs.x.shape[2:]])
        token = saved.statistics.new_zeros(())
        ctx.save_for_backward(token, *saved.flatten())
        ctx.mark_non_differentiable(*computed)
        ctx.set_materialize_grads(False)
        return *results, token

    @staticmethod
    @skipped_by_compilers
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched_gradients(*grad_outputs)
        spec: StageSpec = ctx.spec
        grad_outputs, grad_input = grad_outputs[: spec.num_outputs], ctx.handoffs.of_input.take()
        if all(grad is None for grad in grad_outputs):
            gradients = Gradients(grad_input, [None] * spec.num_tensors)
        elif torch.is_grad_enabled():
            gradients = _differentiable_gradients(ctx, grad_outputs, grad_input)
        elif len(ctx.groups) == 1:
            gradients = _gradients(ctx, grad_outputs, grad_input)
        else:
            return None, None, None, None, *_last_group(ctx, grad_outputs, grad_input)
        return None, None, None, None, *_release(ctx.groups[-1], gradients, ctx.handoffs, ctx.device)


def _gradients(ctx: Any, grad_outputs: Sequence[Tensor | None], grad_input: Tensor | None) -> Gradients:
    """By the operator: all at once."""
    spec, (_, *tensors) = ctx.spec, ctx.saved_tensors
    saved = SavedStage.unflatten(spec, tensors)
    grad_outputs = _by_consumer_and_block(spec, grad_outputs)
    with below_autograd():
        grad, *grads = operators.stage_backward(spec, ctx.shape, saved, *grad_outputs, ctx.needs_input_grad[4:])
    return Gradients(_sum(grad, grad_input), grads)


def _differentiable_gradients(ctx: Any, grad_outputs: Sequence[Tensor | None], grad_input: Tensor | None) -> Gradients:
    """The gradients under create_graph=True."""
    spec, (token, *tensors) = ctx.spec, ctx.saved_tensors
    refuse_synchronized(spec.has_count)
    saved = SavedStage.unflatten(spec, tensors)
    x = second_order.stage_input(spec, ctx.shape, saved)
    if ctx.needs_input_grad[4]:
        x = second_order.Reconnected.apply(token, x, ctx.handoffs.of_input)
    function = partial(second_order.plain_stage, spec, saved)
    with autocast_disabled(x):
        grad, *grads = second_order.differentiable_gradients(function, [x, *saved.parameters], grad_outputs)
    return Gradients(_sum(grad, grad_input), grads)


def _last_group(ctx: Any, grad_outputs: Sequence[Tensor | None], grad_input: Tensor | None) -> list[Tensor | None]:
    """The gradients of the last layer group, with which the backward starts."""
    _, *tensors = ctx.saved_tensors
    saved, last = SavedStage.unflatten(ctx.spec, tensors), ctx.groups[-1]
    backward = Backward(ctx.spec, ctx.shape, saved, grad_input)
    backward.enter(last, saved.parameters[last.tensors], _needs_grad(ctx, last, ctx.needs_input_grad[4:]))
    with autocast_disabled(backward.features), scratch.reused(backward.scratch):
        backward.start(*_by_consumer_and_block(ctx.spec, grad_outputs))
        return _run_group(backward, ctx.handoffs)


def _by_consumer_and_block(
    spec: StageSpec, grad_outputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the consumer's output and of the block's."""
    grads = list(grad_outputs)
    grad_consumer = None if spec.consumer is None else grads.pop(0)
    return grad_consumer, grads.pop() if grads else None


class EarlierLayers(torch.autograd.Function):
    """The backward of a layer group that is not the last; its forward has nothing to compute.

    It saves the group's parameters, although `SharedStage` has them too, so that autograd notices one that has been
    modified in place since, as by a hook of a later layer's gradient.
    """

    @staticmethod
    def forward(ctx: Any, group: LayerGroup, handoffs: Handoffs, before: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.group, ctx.handoffs = group, handoffs
        ctx.save_for_backward(*tensors)
        return before.new_zeros(())

    @staticmethod
    @skipped_by_compilers
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        backward = ctx.handoffs.to_earlier.take()
        if backward is None:
            raise RuntimeError(
                "found a backward that starts in the middle of a stage, but the shared engine's layers run in one "
                f"backward: use {_CHECKPOINT}"
            )
        if isinstance(backward, Gradients):
            return None, None, *_release(ctx.group, backward, ctx.handoffs, grad_output.device)
        backward.enter(ctx.group, ctx.saved_tensors, _needs_grad(ctx, ctx.group, ctx.needs_input_grad[2:]))
        with autocast_disabled(backward.features), scratch.reused(backward.scratch):
            return None, None, *_run_group(backward, ctx.handoffs)


def _needs_grad(ctx: Any, group: LayerGroup, needs_input_grad: Sequence[bool]) -> Sequence[bool]:
    """Whether what comes before a group needs a gradient, and which of the group's tensors do.

    Under `autograd.grad` of some inputs, the node of the group before may not run, and then nobody takes the gradient.
    """
    needs_grad, *rest = needs_input_grad
    if needs_grad and group.layers.start > 0:
        node = next(node for node, _ in ctx.next_functions if node is not None and node.name() == _EARLIER_NODE)
        needs_grad = will_execute(node)
    return needs_grad, *rest


_EARLIER_NODE = "EarlierLayersBackward"
_CHECKPOINT = "model.set_engine('checkpoint'), or make_efficient(model, 'checkpoint') for another library's model"


def _run_group(backward: Backward, handoffs: Handoffs) -> list[Tensor | None]:
    """The gradients of what comes before the group, and of its tensors."""
    grads = backward.run_group()
    if not backward.needs_grad_input:
        return [None, *grads]
    if backward.group.layers.start == 0:
        return [_sum(backward.grad_stage_input(), backward.grad_of_input), *grads]
    handoffs.to_earlier.hand_on(backward)
    return [backward.features.new_zeros(()), *grads]


def _release(group: LayerGroup, gradients: Gradients, handoffs: Handoffs, device: torch.device) -> list[Tensor | None]:
    """The same where all gradients have been computed."""
    grads = gradients.parameters[group.tensors]
    if group.layers.start == 0:
        return [gradients.input, *grads]
    handoffs.to_earlier.hand_on(gradients)
    return [torch.zeros((), device=device), *grads]


def _sum(grad: Tensor | None, other: Tensor | None) -> Tensor | None:
    return grad if other is None else other if grad is None else grad + other


def refuse_batched_gradients(*grad_outputs: Tensor | None) -> None:
    """Called in a backward."""
    if any(map(is_batched_gradient, grad_outputs)):
        raise RuntimeError(
            "found a backward of several gradients at once (is_grads_batched=True, or vectorize=True), but the shared "
            f"engine takes one at a time: give them one by one, or use {_CHECKPOINT}"
        )


def refuse_synchronized(is_synchronized: bool) -> None:
    """Called in a backward under create_graph=True."""
    if is_synchronized:
        raise RuntimeError(
            "found create_graph=True with synchronized norms, but the backward of those has no derivative: for a loss "
            "that contains a gradient, leave the norms of each process to themselves"
        )
