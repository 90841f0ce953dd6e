"""The tensors that a function computes with besides its arguments."""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import is_leaf_node


def modules_of(function: Callable) -> list[nn.Module]:
    """The modules that a callable is, belongs to, or carries along."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        carried = (value for value in (*function.args, *function.keywords.values()) if isinstance(value, nn.Module))
        return [*modules_of(function.func), *carried]
    owner = getattr(function, "__self__", None)
    return [owner] if isinstance(owner, nn.Module) else []


def modules_reached_by(function: Callable) -> list[nn.Module]:
    """The modules that a function mentions, or that what it mentions does: closures, defaults, globals, attributes."""
    found: list[nn.Module] = []
    seen: set[int] = set()
    values, depth = [function], 0
    while values and depth < _DEPTH:
        values = [value for value in values if not (id(value) in seen or seen.add(id(value)))]
        found += (value for value in values if isinstance(value, nn.Module))
        values = [each for value in values if not isinstance(value, nn.Module) for each in _mentioned_by(value)]
        depth += 1
    return found


_DEPTH = 6
_MANY = 1000  # longer collections are data


def _mentioned_by(value: Any) -> Iterable[Any]:
    if isinstance(value, (type, ModuleType, Tensor)):
        return ()
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        mentioned = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        return [*cells, *(value.__defaults__ or ()), *mentioned]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, (list, tuple, dict)):
        return () if len(value) > _MANY else list(value.values() if isinstance(value, dict) else value)
    return [*getattr(value, "__dict__", {}).values(), vars(type(value)).get("__call__")]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def parameters_of(*modules: nn.Module) -> list[Tensor]:
    """The tensors that `modules` optimise, also in the replicas of `nn.DataParallel`, whose `parameters()` is empty."""
    found = {}
    for module in chain.from_iterable(m.modules() for m in modules):
        replicated = getattr(module, "_former_parameters", {})
        for tensor in chain(module._parameters.values(), replicated.values()):
            if tensor is not None:
                found[id(tensor)] = tensor
    return list(found.values())


def check_listed(name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], listed: Sequence[Tensor]) -> None:
    """Refuse outputs that were computed from tensors that need a gradient and were neither given nor listed."""
    unlisted = _unlisted_leaves(outputs, [*inputs, *listed])
    if unlisted:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in unlisted[:3])
        raise RuntimeError(
            f"{name} computes with {len(unlisted)} tensor(s) that need a gradient and were not given (of shape {shapes}"
            f"{', …' if len(unlisted) > 3 else ''}): list them, or their modules, in checkpoint(..., parameters=[...])"
        )


def _unlisted_leaves(outputs: Iterable[Tensor], listed: Sequence[Tensor]) -> list[Tensor]:
    known = {id(tensor) for tensor in listed}
    seen = {tensor.grad_fn for tensor in listed if tensor.grad_fn is not None}
    leaves = {id(output): output for output in outputs if output.requires_grad and output.grad_fn is None}
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_leaf_node(node):
            leaf = node.variable
            leaves[id(leaf)] = leaf
            del leaf
        stack.extend(earlier for earlier, _ in node.next_functions if earlier is not None)
    unlisted = {key: leaf for key, leaf in leaves.items() if key not in known}
    leaves.clear()
    # A leaf that nobody but the graph holds was made in the call itself.
    return [unlisted[key] for key in unlisted if sys.getrefcount(unlisted[key]) > _holders_in_a_graph()]


@functools.cache
def _holders_in_a_graph() -> int:
    """The references to a leaf that only a graph, and a dict as above, holds."""
    node = (torch.ones(1, requires_grad=True) * 1).grad_fn.next_functions[0][0]
    held = {0: node.variable}
    return sys.getrefcount(held[0])
