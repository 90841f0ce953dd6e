"""A budget that a model has been given before the shape of its inputs is known."""

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._compilers import is_exporting
from .._torch_private import functorch_is_active
from ..engine.choose import engine_blocks
from ..memory.sizes import parse_bytes

if TYPE_CHECKING:
    from ..memory.budget import BudgetPlan


class MemoryBudget:
    """Plans for a model when it first trains on inputs of a shape. A plan is good for inputs that are no larger, as
    long as the same parameters are trained in the same modes by the same engines.

    Attributes:
        size: in bytes.
        plan: the newest, or None.
    """

    def __init__(self, budget: int | str) -> None:
        self.size = parse_bytes("memory_budget", budget)
        self.plan: BudgetPlan | None = None
        self._planned: tuple[Any, tuple[int, ...]] | None = None

    def prepare(self, model: nn.Module, x: Tensor) -> None:
        """Plan, if a training step on `x` has no plan. A compiler, an exporter or a transform plans nothing."""
        if x.is_meta or torch.compiler.is_compiling() or functorch_is_active() or is_exporting(model.training):
            return
        trained = [parameter.requires_grad for parameter in model.parameters()]
        if not (model.training and torch.is_grad_enabled() and any(trained)):
            return
        kind, shape = x.device.type, tuple(x.shape)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        engines = [block.engine for _, block in engine_blocks(model)]
        state = dtype, trained, [module.training for module in model.modules()], engines
        planned = self._planned
        if planned is not None and planned[0] == state and all(map(operator.le, shape, planned[1])):
            return
        from ..memory.budget import set_memory_budget

        precision = dtype if dtype is not x.dtype else None
        self.plan = set_memory_budget(model, self.size, shape, precision=precision)
        self._planned = state, shape
