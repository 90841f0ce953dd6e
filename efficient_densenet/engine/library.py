"""The operators of stages and stems: their library, when they are called, and what their backwards refuse.

An operator's autograd formula is an `autograd.Function`. Eager mode applies it directly, with a specification that is
an object, and its forward and backward run the engine without any operator. Compilers, dispatch modes and tensor
subclasses see the operators, which take the specification as a string: the operator's implementation for autograd
applies the same Function, whose forward and backward call the operators below autograd.

`torch.library.register_autograd` cannot register these formulas. It differentiates a list of tensors only if the list
has no None, but a stage's convolutions may have no bias; it makes one node of each call, but a large stage has a node
for each layer group; and eager mode would call the operator twice and encode each specification.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compilers import skipped_by_compilers
from .._torch_private import has_dispatch_mode, is_batched_gradient

LIBRARY = torch.library.Library("efficient_densenet", "FRAGMENT")
USE_CHECKPOINT = (
    "use model.set_engine('checkpoint'), or make_efficient(model, 'checkpoint') for another library's model"
)
_ORDINARY_TYPES = {Tensor, torch.nn.Parameter, type(None)}


def implement(name: str, dispatch_key: str = "CompositeExplicitAutograd") -> Callable[[Callable], Callable]:
    """Register a function as an operator's implementation, which compilers skip."""

    def register(function: Callable) -> Callable:
        return torch.library.impl(LIBRARY, name, dispatch_key)(skipped_by_compilers(function))

    return register


def run_operator(name: str, eager: Callable, spec: Any, tensors: Sequence[Any]) -> list[Tensor]:
    """The results of an operator. A compiler records the operator; eager mode calls the function `eager`."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.efficient_densenet, name).default(*tensors, spec.encoded)
    return eager(spec, tensors)


def are_ordinary(*tensors: Tensor | None) -> bool:
    """Whether no compiler, dispatch mode or tensor subclass has to see an operator on these tensors."""
    return _ORDINARY_TYPES.issuperset(map(type, tensors)) and not has_dispatch_mode()


def needs_graph(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def refuse_batched_gradients(*grad_outputs: Tensor | None) -> None:
    """Raise RuntimeError in a backward of several gradients at once."""
    if any(map(is_batched_gradient, grad_outputs)):
        raise RuntimeError(
            "found a backward of several gradients at once (is_grads_batched=True, or vectorize=True), but the shared "
            f"engine takes one at a time: give them one by one, or {USE_CHECKPOINT}"
        )


def refuse_synchronized(is_synchronized: bool) -> None:
    """Raise RuntimeError in a backward under create_graph=True if the norms are synchronized."""
    if is_synchronized:
        raise RuntimeError(
            "found create_graph=True with synchronized norms, whose backward is not differentiable: for a loss that "
            "contains a gradient, do not synchronize the norms"
        )
