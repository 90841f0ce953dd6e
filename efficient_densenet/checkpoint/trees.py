"""Arguments and results of any shape as flat lists, by torch's own pytrees; dataclasses are opened as well."""

import dataclasses
from typing import Any

import torch.utils._pytree as pytree


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    leaves, spec = pytree.tree_flatten(tree)
    if any(map(_is_opened, leaves)):
        leaves, spec = pytree.tree_flatten(_open(tree))
    return leaves, spec


unflatten = pytree.tree_unflatten


class _Opened:
    """A dataclass instance on its way to being flattened; what is unflattened is an instance again."""

    def __init__(self, instance: Any) -> None:
        self.kind = type(instance)
        self.fields = {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance)}


def _is_opened(leaf: Any) -> bool:
    """Whether a leaf is a dataclass instance, one that pytrees do not know by themselves."""
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _open(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: _Opened(leaf) if _is_opened(leaf) else leaf, tree)


def _flatten_opened(opened: _Opened) -> tuple[list[Any], Any]:
    return [_open(value) for value in opened.fields.values()], (opened.kind, tuple(opened.fields))


def _unflatten_opened(values: Any, context: Any) -> Any:
    kind, names = context
    instance = object.__new__(kind)  # its __init__ and __post_init__ ran when it was made
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)  # frozen ones included
    return instance


pytree.register_pytree_node(_Opened, _flatten_opened, _unflatten_opened)
