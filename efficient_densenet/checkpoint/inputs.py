"""The tensor arguments of a checkpointed call, kept from the forward to the recomputation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_private import has_torch_dispatch, tensor_hooks
from .offload import check_version, offload_to_cpu


class SavedInputs:
    """The tensor arguments of a call. `restored()` returns them as the function saw them in the forward.

    Autograd saves them, so that it detects in-place changes, and so that an outer checkpoint recomputes them and an
    outer saved-tensor hook sees them. Without such hooks, autograd returns the very objects that were passed. With
    hooks it returns other tensors, which are given the class and the Python attributes of the arguments.

    A leaf that requires a gradient is kept as the same object: the graph references it anyway, and the function may
    test whether it is a certain parameter of a module or a closure.
    """

    def __init__(self, tensors: Sequence[Tensor], offload: bool) -> None:
        self.leaves = {i: (t, t._version) for i, t in enumerate(tensors) if t.is_leaf and t.requires_grad}
        self.traits = [_Traits(tensor) for tensor in tensors]
        others = [tensor for i, tensor in enumerate(tensors) if i not in self.leaves]
        with offload_to_cpu(offload):
            self.saved: Any = _SaveInputs.apply(torch.empty(0, requires_grad=True), *others)

    def restored(self) -> "_RestoredInputs":
        """Return a context that returns the arguments, with the Python attributes that they had in the forward."""
        return _RestoredInputs(self._unpack(), self.traits)

    def _unpack(self) -> list[Tensor]:
        for leaf, version in self.leaves.values():
            check_version(leaf, version)
        others = iter(self.saved.grad_fn.saved_tensors[1:])
        tensors = [self.leaves[i][0] if i in self.leaves else next(others) for i in range(len(self.traits))]
        return [traits.alias(tensor) for traits, tensor in zip(self.traits, tensors, strict=True)]


class _RestoredInputs:
    """The context of a recomputation. It undoes changes of the arguments' Python attributes and hooks."""

    def __init__(self, tensors: list[Tensor], traits: Sequence["_Traits"]) -> None:
        self.tensors, self.traits = tensors, traits

    def __enter__(self) -> list[Tensor]:
        self.current = [_Traits(tensor) for tensor in self.tensors]
        for traits, tensor in zip(self.traits, self.tensors, strict=True):
            traits.set_attributes(tensor)
        return self.tensors

    def __exit__(self, *error: object) -> None:
        for traits, tensor in zip(self.current, self.tensors, strict=True):
            traits.set_attributes(tensor)
            traits.remove_later_hooks(tensor)


class _Traits:
    """The class, requires_grad, Python attributes and hooks of a tensor, which a function can read and change."""

    def __init__(self, tensor: Tensor) -> None:
        self.type, self.requires_grad = type(tensor), tensor.requires_grad
        # The attributes of a class with `__torch_dispatch__` may be its inner tensors.
        self.attributes = None if has_torch_dispatch(self.type) else vars(tensor).copy()
        hooks = tensor_hooks(tensor)
        self.hooks = set(hooks) if hooks else ()

    def alias(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if it has the saved class and requires_grad, and otherwise an alias that has them."""
        if type(tensor) is self.type and tensor.requires_grad == self.requires_grad:
            return tensor
        alias = tensor.detach()
        alias = alias if type(alias) is self.type else alias.as_subclass(self.type)
        return alias.requires_grad_(self.requires_grad)

    def set_attributes(self, tensor: Tensor) -> None:
        """Give `tensor` the saved Python attributes, and no others."""
        wanted = self.attributes
        if wanted is None:
            return
        current = vars(tensor)
        if not current and not wanted:
            return
        if current.keys() != wanted.keys() or any(current[name] is not wanted[name] for name in wanted):
            current.clear()
            current.update(wanted)

    def remove_later_hooks(self, tensor: Tensor) -> None:
        """Remove `register_hook` hooks that were added since the traits were saved: the forward has registered them."""
        hooks = tensor_hooks(tensor)
        if hooks:
            for key in hooks.keys() - self.hooks:
                del hooks[key]


def with_class_and_attributes(alias: Tensor, tensor: Tensor) -> Tensor:
    """Return `alias` with the class and the Python attributes of `tensor`."""
    if type(alias) is not type(tensor):
        alias = alias.as_subclass(type(tensor))
    if not has_torch_dispatch(type(tensor)) and vars(tensor):
        vars(alias).update(vars(tensor))
    return alias


class _SaveInputs(torch.autograd.Function):
    """Saves its arguments for backward: autograd detects in-place changes, and an outer checkpoint recomputes them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Tensor | None) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> None:
        raise AssertionError("no output depends on the saved inputs, so no backward reaches this node")
