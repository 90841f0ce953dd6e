"""Layer groups: consecutive layers of a large stage, whose gradients one autograd node computes and releases.

The stage's node is the last group's. Each earlier group has a node before it in the graph, which continues the
backward.
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
"""How large the parameters of a layer group may be, if it has more than one layer."""

Value = TypeVar("Value")


class LayerGroup(NamedTuple):
    """Consecutive layers of a stage whose gradients are released together, and their slice of all its tensors."""

    layers: range
    tensors: slice


def whole_stage(spec: StageSpec) -> LayerGroup:
    """All layers, and the consumer, as one group."""
    return LayerGroup(range(len(spec.layers)), slice(0, spec.num_tensors))


def layer_groups(spec: StageSpec, parameters: Sequence[Tensor | None]) -> list[LayerGroup]:
    """From the first layers to the last; the last group has the consumer too."""
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
    """What one node hands on to another that runs later in the same backward.

    It is one value for each backward that runs through a graph; several may, one after another or in threads. The
    callback that autograd drops with a backward, finished or failed, owns the value: nothing outlives the backward.
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
    """What the nodes of a stage hand on: from a layer group to the group before it, and from `Reconnected`."""

    to_earlier: Handoff["Backward | StageGradients"]
    of_input: Handoff[Tensor]


class EarlierLayers(torch.autograd.Function):
    """The backward of a layer group that is not the last; its forward has nothing to compute.

    It saves the group's parameters, although the stage's node has them too, so that autograd notices one that has been
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
    """The gradients of what comes before a layer group, with which `needs_grad` begins, and of the group's tensors.

    The last group, which is the first to run, has the gradients of the consumer's output and of the block's.
    """
    backward.enter(group, parameters, _needs_grad(ctx, group, needs_grad))
    with autocast_disabled(backward.features), scratch.reused(backward.scratch):
        if grad_outputs is not None:
            backward.start(*grad_outputs)
        grads = backward.run_group()
        if not backward.needs_grad_input:
            return [None, *grads]
        if group.layers.start == 0:
            return [add(backward.grad_stage_input(), backward.grad_of_input), *grads]
    ctx.handoffs.to_earlier.hand_on(backward)
    return [backward.features.new_zeros(()), *grads]


def _needs_grad(ctx: Any, group: LayerGroup, needs_input_grad: Sequence[bool]) -> Sequence[bool]:
    """Whether what comes before a group needs a gradient, and which of the group's tensors do.

    Under `autograd.grad` of some inputs, the node of the group before may not run, and then nobody takes the gradient.
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
    """What `run_group` returns, where all gradients of the stage have been computed."""
    grads = gradients.parameters[group.tensors]
    if group.layers.start == 0:
        return [gradients.input, *grads]
    handoffs.to_earlier.hand_on(gradients)
    return [torch.zeros((), device=device), *grads]


def add(grad: Tensor | None, other: Tensor | None) -> Tensor | None:
    return grad if other is None else other if grad is None else grad + other
