"""Flatten arguments and results of any structure with PyTorch's pytrees, which are extended here to dataclasses."""

import copy
import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of `tree`, and the spec from which `unflatten` rebuilds it."""
    leaves, spec = pytree.tree_flatten(tree)
    if any(map(_is_dataclass_instance, leaves)):
        leaves, spec = pytree.tree_flatten(_wrap_dataclasses(tree))
    return leaves, spec


unflatten = pytree.tree_unflatten


def flatten_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec | None]:
    """Return the leaves of the arguments of a call, and the spec for `unflatten_arguments`."""
    if not kwargs and all(isinstance(value, Tensor) for value in args):
        return list(args), None  # the usual call: pytrees would take longer
    return flatten((args, kwargs))


def unflatten_arguments(leaves: list[Any], spec: pytree.TreeSpec | None) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments that `flatten_arguments` took apart."""
    return (tuple(leaves), {}) if spec is None else unflatten(leaves, spec)


class _DataclassNode:
    """A dataclass instance as a node that pytrees can flatten. Unflattening returns an instance of the dataclass."""

    def __init__(self, instance: Any) -> None:
        names = (f.name for f in dataclasses.fields(instance))
        self.fields = {name: getattr(instance, name) for name in names if hasattr(instance, name)}
        self.template = copy.copy(instance)  # has the attributes that are not fields
        for name in self.fields:
            with suppress(AttributeError):  # the field's value is the class's default
                object.__delattr__(self.template, name)


def _is_dataclass_instance(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, nn.Module, Tensor))


def _wrap_dataclasses(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: _DataclassNode(leaf) if _is_dataclass_instance(leaf) else leaf, tree)


def _flatten_dataclass(node: _DataclassNode) -> tuple[list[Any], Any]:
    return [_wrap_dataclasses(value) for value in node.fields.values()], (node.template, tuple(node.fields))


def _unflatten_dataclass(values: Iterable[Any], context: Any) -> Any:
    template, names = context
    instance = copy.copy(template)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)  # works for frozen dataclasses too
    return instance


pytree.register_pytree_node(_DataclassNode, _flatten_dataclass, _unflatten_dataclass)
