"""The autograd nodes of a stage: one for all of its forward, whose backward may be split into one a layer group.

A large stage's gradients are thereby released group by group, from the last layers to the first, before those of the
first layers exist. Parameters are inputs of the nodes, so that replicas and gathered parameters get their gradients.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import graph_task_id, is_batched_gradient, queue_backward_callback, will_execute
from ..kernels import scratch
from ..parts import BlockParts, ConsumerParts
from ..precision import autocast_disabled
from .backward import Backward
from .forward import Forward
from .plan import LayerGroup, StagePlan
from .saved import SavedStage
from .statistics import SharedStatistics
from .stored import StoredFeatures, stored_statistics


def run(block: BlockParts, x: Tensor, consumer: ConsumerParts | None = None) -> Tensor:
    """The output of a block, or of `consumer` (a transition or a norm) on it."""
    plan = StagePlan(block, consumer, x)
    return plan.finish(apply(plan, x, *plan.tensors)[0])


def run_with_features(block: BlockParts, x: Tensor, consumer: ConsumerParts) -> tuple[Tensor, Tensor]:
    """The output of `consumer` on the output of a block, and the block's too."""
    plan = StagePlan(block, consumer, x, return_features=True)
    output, features = apply(plan, x, *plan.tensors)
    return plan.finish(output), features


def run_consumer(consumer: ConsumerParts, x: Tensor) -> Tensor:
    """The output of `consumer` on x, which may be any tensor; a block's own output need not be stored again."""
    plan = StagePlan(BlockParts(()), consumer, x)
    return plan.finish(apply(plan, x, *plan.tensors, stored=stored_statistics(x, plan))[0])


def apply(
    plan: StagePlan, x: Tensor, *tensors: Tensor | None, stored: SharedStatistics | None = None
) -> tuple[Tensor, ...]:
    """The consumer's output, the block's, or both, with `tensors` as the values of the plan's parameters."""
    before, handoff, (*earlier, last) = x, BackwardHandoff(), plan.groups
    for group in earlier:
        before = EarlierLayers.apply(group, handoff, before, *tensors[group.tensors])
    return SharedStage.apply(plan, handoff, x.detach(), stored, tensors, before, *tensors[last.tensors])


class BackwardHandoff:
    """Hands a stage's `Backward` from the node of one layer group to the node of the group before.

    Several backwards may run through one graph, one after another or in threads, so each has its own entry. The
    callback that autograd drops with a backward, finished or failed, owns the entry: nothing outlives the backward.
    """

    def __init__(self) -> None:
        self._by_graph_task: weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()

    def hand_on(self, backward: Backward) -> None:
        entry = _Entry(backward)
        self._by_graph_task[graph_task_id()] = entry
        queue_backward_callback(entry.clear)

    def take(self) -> Backward:
        entry = self._by_graph_task.pop(graph_task_id(), None)
        if entry is None or entry.backward is None:
            raise RuntimeError(
                "found a backward that starts in the middle of a stage, but the shared engine's layers run in one "
                f"backward: use {_CHECKPOINT}"
            )
        backward = entry.backward
        entry.clear()
        return backward


class _Entry:
    def __init__(self, backward: Backward) -> None:
        self.backward: Backward | None = backward

    def clear(self) -> None:
        self.backward = None


class SharedStage(torch.autograd.Function):
    """All of a stage's forward, and the backward of its consumer and its last layer group.

    `stored` are features and statistics of x from an earlier stage, if there are any. `parameters` are the plan's.
    `before` is the stage's input, or a scalar that stands for the earlier layer groups: only its place in the graph
    counts, since autograd then runs their nodes after this one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: StagePlan,
        handoff: BackwardHandoff,
        x: Tensor,
        stored: SharedStatistics | None,
        parameters: Sequence[Tensor | None],
        before: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        with autocast_disabled(x), scratch.reused():
            forward = Forward(plan, x, parameters, stored)
            outputs = forward.run()
        if plan.consumer is None and not plan.output_order.first:
            ctx.stored_features = StoredFeatures(outputs[0], forward.statistics)
        ctx.plan, ctx.handoff, ctx.shape, ctx.count = plan, handoff, forward.shape, forward.statistics.count
        ctx.save_for_backward(*forward.saved.flatten(), *parameters)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_other_backwards(*grad_outputs)
        plan: StagePlan = ctx.plan
        saved, tensors = SavedStage.unflatten(ctx.saved_tensors, len(plan.layers))
        backward = Backward(plan, ctx.shape, ctx.count, saved, tensors)
        grad_consumer, grad_block = grad_outputs if plan.return_features else (*grad_outputs, None)
        if plan.consumer is None:
            grad_consumer, grad_block = None, grad_consumer
        backward.enter(plan.groups[-1], _needs_grad(ctx, plan.groups[-1], ctx.needs_input_grad[5:]))
        with autocast_disabled(backward.features), scratch.reused(backward.scratch):
            backward.start(grad_consumer, grad_block)
            return None, None, None, None, None, *_run_group(backward, ctx.handoff)


class EarlierLayers(torch.autograd.Function):
    """The backward of a layer group that is not the last; its forward has nothing to compute."""

    @staticmethod
    def forward(
        ctx: Any, group: LayerGroup, handoff: BackwardHandoff, before: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        ctx.group, ctx.handoff = group, handoff
        return before.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        backward = ctx.handoff.take()
        backward.enter(ctx.group, _needs_grad(ctx, ctx.group, ctx.needs_input_grad[2:]))
        with autocast_disabled(backward.features), scratch.reused(backward.scratch):
            return None, None, *_run_group(backward, ctx.handoff)


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


def _run_group(backward: Backward, handoff: BackwardHandoff) -> list[Tensor | None]:
    """The gradients of what comes before the group, and of its tensors."""
    grads = backward.run_group()
    if not backward.needs_grad_input:
        return [None, *grads]
    if backward.group.layers.start == 0:
        return [backward.grad_stage_input(), *grads]
    handoff.hand_on(backward)
    return [backward.features.new_zeros(()), *grads]


def refuse_other_backwards(*grad_outputs: Tensor | None) -> None:
    """Called in a backward: it records a graph of its own only under create_graph=True."""
    if any(map(is_batched_gradient, grad_outputs)):
        raise RuntimeError(
            "found a backward of several gradients at once (is_grads_batched=True, or vectorize=True), but the shared "
            f"engine takes one at a time: give them one by one, or use {_CHECKPOINT}"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "found create_graph=True, but the shared engine gives first derivatives only: for a loss that contains a "
            f"gradient use {_CHECKPOINT}"
        )
