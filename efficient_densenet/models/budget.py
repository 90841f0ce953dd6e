"""A budget that a model has been given before the shape of its inputs is known."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .._compilers import is_exporting
from ..memory.sizes import parse_bytes

if TYPE_CHECKING:
    from ..memory.budget import BudgetPlan


class MemoryBudget:
    """Plans for a model when it first trains on inputs of a shape; a plan is good for inputs that are no larger.

    Attributes:
        size: in bytes.
        plan: the newest, or None.
    """

    def __init__(self, budget: int | str) -> None:
        self.size = parse_bytes("memory_budget", budget)
        self.plan: BudgetPlan | None = None
        self._planned: tuple[torch.dtype, tuple[int, ...]] | None = None

    def prepare(self, model: nn.Module, x: Tensor) -> None:
        """Plan, if a training step on `x` has no plan. Nothing is planned while a compiler or an exporter traces."""
        if x.is_meta or not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        kind, shape = x.device.type, tuple(x.shape)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if is_exporting(model.training) or self._covers(dtype, shape):
            return
        from ..memory.budget import set_memory_budget

        precision = dtype if dtype is not x.dtype else None
        self.plan = set_memory_budget(model, self.size, shape, precision=precision)
        self._planned = dtype, shape

    def _covers(self, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        if self._planned is None or self._planned[0] is not dtype:
            return False
        return all(size <= planned for size, planned in zip(shape, self._planned[1], strict=True))
