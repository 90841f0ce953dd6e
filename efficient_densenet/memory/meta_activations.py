"""Activations on the meta device, where PyTorch composes some backwards of several operations, which allocate more than
the one operation of a CPU or a GPU."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_COMPOSED = {"silu", "mish"}
"""The names of the functions."""


class MetaActivations(TorchFunctionMode):
    """Lets the backward of these functions allocate the gradient alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _COMPOSED and len(args) == 1 and not any((kwargs or {}).values()):
            return _OneOperation.apply(*args)
        return func(*args, **kwargs or {})


class _OneOperation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.empty_like(x)
