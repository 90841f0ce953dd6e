"""Layer groups: consecutive layers of a large stage, whose gradients one autograd node computes and releases.

The stage's node runs the backward of the last group. Each earlier group has a node of its own, earlier in the graph,
which continues the backward.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..._compilers import skipped_by_compilers
from ..._tensors import autocast_disabled
from ..._torch_private import graph_task_id, queue_backward_callback, will_execute
from ...kernels import scratch
from ..library import USE_CHECKPOINT
from .spec import StageSpec

if TYPE_CHECKING:
    from .backward import Backward

LAYER_GROUP_BYTES = 1 << 21
"""The most bytes of parameters in a layer group with more than one layer."""

Value = TypeVar("Value")


class LayerGroup(NamedTuple):
    """Consecutive layers of a stage whose gradients are released together, and the slice of their parameters."""

    layers: range
    tensors: slice


def whole_stage(spec: StageSpec) -> LayerGroup:
    """All layers, and the consumer, as one group."""
    return LayerGroup(range(len(spec.layers)), slice(0, spec.num_tensors))


def layer_groups(spec: StageSpec, parameters: Sequence[Tensor | None]) -> list[LayerGroup]:
    """The layer groups, from the first layers to the last; the last group has the consumer too."""
    firsts, size = [0], 0
    for i, tensors in enumerate(map(spec.layer_tensors, range(len(spec.layers)))):
        own = sum(tensor.nbytes for tensor in parameters[tensors] if tensor is not None)
        if i > firsts[-1] and size + own > LAYER_GROUP_BYTES:
            firsts.append(i)
            size = 0
        size += own
    starts = [0, *(spec.layer_tensors(first).start for first in firsts[1:])]
    nexts, stops = [*firsts[1:], len(spec.layers)], [*starts[1:], len(parameters)]
    return list(map(LayerGroup, map(range, firsts, nexts), map(slice, starts, stops)))


class Handoff(Generic[Value]):
    """Passes a value from one node to another node that runs later in the same backward.

    Each backward has its own value: several may run through a graph, one after another or in threads. The backward's
    queued callback owns the value, and autograd frees the callback with the backward, whether it finished or failed.
    """

    def __init__(self) -> None:
        self._by_graph_task: weakref.WeakValueDictionary[int, _Entry[Value]] = weakref.WeakValueDictionary()

    def hand_on(self, value: Value) -> None:
        entry = _Entry(value)
        self._by_graph_task[graph_task_id()] = entry
        queue_backward_callback(entry.clear)

    def take(self) -> Value | None:
        """The value of the backward that runs now; None if there is none."""
        entry = self._by_graph_task.pop(graph_task_id(), None)
        if entry is None:
            return None
        value = entry.value
        entry.clear()
        return value


class _Entry(Generic[Value]):
    def __init__(self, value: Value) -> None:
        self.value: Value | None = value

    def clear(self) -> None:
        self.value = None


class StageGradients(NamedTuple):
    """The gradients of the stage's input and of its parameters, where they have all been computed at once."""

    input: Tensor | None
    parameters: Sequence[Tensor | None]


class Handoffs(NamedTuple):
    """The handoffs between a stage's nodes: from a layer group to the group before it, and from `Reconnected`."""

    to_earlier: Handoff["Backward | StageGradients"]
    grad_input: Handoff[Tensor]


class EarlierLayers(torch.autograd.Function):
    """The backward of a layer group that is not the last; its forward has nothing to compute.

    It saves the group's parameters, although the stage's node has them too, so that autograd detects a parameter that
    has been modified in place since, for example by a hook on a later layer's gradient.
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
                f"backward: {USE_CHECKPOINT}"
            )
        if isinstance(backward, StageGradients):
            return None, None, *release(ctx.group, backward, ctx.handoffs, grad_output.device)
        return None, None, *run_group(ctx, ctx.group, backward, ctx.saved_tensors, ctx.needs_input_grad[2:])


def run_group(
    ctx: Any,
    group: LayerGroup,
    backward: "Backward",
    parameters: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    grad_outputs: tuple[Tensor | None, Tensor | None] | None = None,
) -> list[Tensor | None]:
    """The gradient of a node's input, then of the parameters of its layer group; `needs_grad` has the same order.

    Only the last group, which is the first to run, gets `grad_outputs`: of the consumer's and the block's output.
    """
    backward.enter(group, parameters, _needs_grad(ctx, group, needs_grad))
    with autocast_disabled(backward.features), scratch.reused(backward.scratch):
        if grad_outputs is not None:
            backward.start(*grad_outputs)
        grads = backward.run_group()
        if not backward.needs_grad_input:
            return [None, *grads]
        if group.layers.start == 0:
            return [add(backward.grad_stage_input(), backward.other_grad_input), *grads]
    ctx.handoffs.to_earlier.hand_on(backward)
    return [backward.features.new_zeros(()), *grads]


def _needs_grad(ctx: Any, group: LayerGroup, needs_input_grad: Sequence[bool]) -> Sequence[bool]:
    """Whether the input of a group's node needs a gradient, and which of the group's parameters do.

    Under `autograd.grad` of some inputs, the node of the group before may not run: then its gradient is not needed.
    """
    needs_grad, *rest = needs_input_grad
    if needs_grad and group.layers.start > 0:
        name = f"{EarlierLayers.__name__}Backward"
        node = next(node for node, _ in ctx.next_functions if node is not None and node.name() == name)
        needs_grad = will_execute(node)
    return needs_grad, *rest


def release(
    group: LayerGroup, gradients: StageGradients, handoffs: Handoffs, device: torch.device
) -> list[Tensor | None]:
    """The results of `run_group`, where all gradients of the stage have been computed already."""
    grads = gradients.parameters[group.tensors]
    if group.layers.start == 0:
        return [gradients.input, *grads]
    handoffs.to_earlier.hand_on(gradients)
    return [torch.zeros((), device=device), *grads]


def add(grad: Tensor | None, other: Tensor | None) -> Tensor | None:
    return grad if other is None else other if grad is None else grad + other
