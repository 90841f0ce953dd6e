"""Arguments and results of any shape as flat lists, by torch's own pytrees; dataclasses are opened as well."""

import copy
import dataclasses
from contextlib import suppress
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    leaves, spec = pytree.tree_flatten(tree)
    if any(map(_is_opened, leaves)):
        leaves, spec = pytree.tree_flatten(_open(tree))
    return leaves, spec


unflatten = pytree.tree_unflatten


class _Opened:
    """A dataclass instance on its way to being flattened; what is unflattened is an instance again."""

    def __init__(self, instance: Any) -> None:
        names = (f.name for f in dataclasses.fields(instance))
        self.fields = {name: getattr(instance, name) for name in names if hasattr(instance, name)}
        self.blank = copy.copy(instance)  # with what it holds besides its fields
        for name in self.fields:
            with suppress(AttributeError):  # a default of the class, not of the instance
                object.__delattr__(self.blank, name)


def _is_opened(leaf: Any) -> bool:
    """Whether a leaf is a dataclass instance, one that pytrees do not know by themselves."""
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, nn.Module, Tensor))


def _open(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: _Opened(leaf) if _is_opened(leaf) else leaf, tree)


def _flatten_opened(opened: _Opened) -> tuple[list[Any], Any]:
    return [_open(value) for value in opened.fields.values()], (opened.blank, tuple(opened.fields))


def _unflatten_opened(values: Any, context: Any) -> Any:
    blank, names = context
    instance = copy.copy(blank)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)  # frozen ones included
    return instance


pytree.register_pytree_node(_Opened, _flatten_opened, _unflatten_opened)
