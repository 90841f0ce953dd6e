"""Skip connections of a U-Net: the block on the way down and the one of its size on the way up share their features.

The block on the way down leaves room in its matrix of features: in front for the upsampled channels, behind for the new
ones of the block on the way up. This one writes its own columns, and reads the others with the statistics that are
known. Nothing is concatenated, and the gradient of the skipped channels returns as that of any output.
"""

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._tensors import device_type
from .._torch_private import has_saved_tensors_hooks, saved_tensors_hooks_enabled
from . import choose, plan
from .limits import must_be_called
from .network import run_sequence
from .operator import are_ordinary
from .parts import EngineBlock, is_engine_block
from .stage.run import Skip, StagePlan, StageRequest, stored_output

Room = tuple[int, int]
"""The columns that a block on the way down leaves before its own and after them."""


def run_down(block: EngineBlock, transition: nn.Module, x: Tensor, room: Room) -> tuple[Tensor, Tensor | Skip]:
    """The output of `transition` on the block's output; and this, which the block on the way up is to read."""
    modules = ("block", block), ("transition", transition)
    stage = _plan_down(block, transition, x, room)
    if stage is not None:
        output, skip = stage.run(x)
        return output, cast(Skip, skip)
    output, outputs = run_sequence(modules, x, is_engine_block, ["block"])
    return output, outputs["block"]


def run_up(
    transition: Any, block: EngineBlock, classifier: nn.Module | None, x: Tensor, skipped: Tensor | Skip
) -> Tensor:
    """The output of `block`, and of the classifier after it if there is one, on the concatenation of what `transition`
    makes of x and what was skipped."""
    modules = [("block", block), *([] if classifier is None else [("classifier", classifier)])]
    if isinstance(skipped, Skip) and not must_be_called(transition):
        upsampled = _upsampled(transition, x, skipped.stored.shape[1:])
        stage = _plan_up(block, classifier, upsampled, skipped)
        if stage is not None:
            return stage.run(upsampled, skipped)[0]
        x = torch.cat([upsampled, skipped.images()], 1)
    else:
        x = transition(x, skipped.images() if isinstance(skipped, Skip) else skipped)
    return run_sequence(modules, x, is_engine_block)[0]


def _upsampled(transition: Any, x: Tensor, size: Sequence[int]) -> Tensor:
    """What `transition` makes of x. For its backward x is not saved: it is read where its block has stored it, unless a
    hook or a forward of the user's has changed it in place."""
    stored, own, reference = stored_output(x), (x.data_ptr(), x.shape), weakref.ref(x)
    if stored is None or has_saved_tensors_hooks() or not saved_tensors_hooks_enabled():
        return transition.upsampled(x, size)

    def pack(tensor: Tensor) -> Tensor | None:  # without x, since its node keeps this function
        present = reference()
        is_stored = present is not None and stored_output(present) is not None
        return None if is_stored and (tensor.data_ptr(), tensor.shape) == own else tensor

    def unpack(packed: Tensor | None) -> Tensor:
        return stored.images() if packed is None else packed

    with saved_tensors_hooks(pack, unpack):
        return transition.upsampled(x, size)


def _plan_down(block: EngineBlock, transition: nn.Module, x: Any, room: Room) -> StagePlan | None:
    """The plan with which block and transition run as one stage that leaves room; None where they cannot, or where what
    is saved of the features is another tensor than these: in hooks for saved tensors, as of a checkpoint."""
    if not (isinstance(x, Tensor) and _may_be_shared(block, x)):
        return None
    if torch.compiler.is_compiling() or not _is_run_here(x) or has_saved_tensors_hooks():
        return None
    plans = plan.plans_of_network([block, transition])
    if plans is None or not plan.needs_grad(x, block):
        return None
    request = StageRequest(return_features=True, room=room)
    stage = plan.plan_stage(plans, [block, transition], 0, x, request)
    if stage is None or stage.sharded or stage.spec.has_count or stage.spec.newest_first:
        return None
    return stage


def _plan_up(block: EngineBlock, classifier: nn.Module | None, x: Tensor, skip: Skip) -> StagePlan | None:
    """The plan with which `block` reads the features of `skip` and writes its own beside them; None where it cannot."""
    if must_be_called(block) or not _may_be_shared(block, x):
        return None
    stage = plan.plan_alone(block, classifier, x, StageRequest(skip=skip.edge.shape[1]))
    if isinstance(stage, str) or stage.sharded or (classifier is not None and stage.spec.consumer is None):
        return None
    spec, (features, _, stored_by, _) = stage.spec, skip.stored
    alike = all(
        getattr(spec, name) == getattr(stored_by, name) for name in ("frozen", "eps", "sync_group", "newest_first")
    )
    fits = alike and spec.order.total == features.shape[1] and x.dtype is features.dtype
    without_norms = spec.new_features_only if spec.consumer is None else not spec.consumer.has_norm
    return stage if fits and without_norms and not any(layer.width for layer in spec.layers) else None


def _may_be_shared(block: EngineBlock, x: Tensor) -> bool:
    return block.can_join_stage and choose.may_run_engines(block, x) and choose.may_be_shared(block)


def _is_run_here(x: Tensor) -> bool:
    """Whether the stages run on the memory of x, or on the meta device for a prediction."""
    return are_ordinary(x) or (x.is_meta and device_type(x) != "meta")
