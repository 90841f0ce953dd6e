"""The modules and parameters that a function uses besides its arguments."""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import is_accumulate_grad, leaf_of

_MAX_DEPTH = 6
_MAX_LENGTH = 1000  # longer collections are taken for data and not searched


def modules_of(function: Callable) -> list[nn.Module]:
    """Return the module that `function` is or is a method of, and the modules bound by `functools.partial`."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        bound = (value for value in (*function.args, *function.keywords.values()) if isinstance(value, nn.Module))
        return [*modules_of(function.func), *bound]
    owner = getattr(function, "__self__", None)
    return [owner] if isinstance(owner, nn.Module) else []


def reachable_modules(function: Callable) -> list[nn.Module]:
    """Return the modules that `function` references, directly or not: by closure, default, global or attribute."""
    modules: list[nn.Module] = []
    seen: set[int] = set()
    values, depth = [function], 0
    while values and depth < _MAX_DEPTH:
        values = [value for value in values if not (id(value) in seen or seen.add(id(value)))]
        modules += (value for value in values if isinstance(value, nn.Module))
        values = [each for value in values if not isinstance(value, nn.Module) for each in _references_of(value)]
        depth += 1
    return modules


def _references_of(value: Any) -> Iterable[Any]:
    if isinstance(value, (type, ModuleType, Tensor)):
        return ()
    if isinstance(value, FunctionType):
        closure = [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
        global_values = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        return [*closure, *(value.__defaults__ or ()), *global_values]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, (list, tuple, dict)):
        return () if len(value) > _MAX_LENGTH else list(value.values() if isinstance(value, dict) else value)
    return [*getattr(value, "__dict__", {}).values(), vars(type(value)).get("__call__")]


def _is_set(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def parameters_of(*modules: nn.Module) -> list[Tensor]:
    """Return the parameters of `modules`, also of `nn.DataParallel` replicas, whose `parameters()` is empty."""
    parameters = {}
    for module in chain.from_iterable(m.modules() for m in modules):
        replicated = getattr(module, "_former_parameters", {})
        for tensor in chain(module._parameters.values(), replicated.values()):
            if tensor is not None:
                parameters[id(tensor)] = tensor
    return list(parameters.values())


def check_parameters_listed(
    name: str,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    remedy: str = "list them, or their modules, in checkpoint(..., parameters=[...])",
) -> None:
    """Raise RuntimeError if `outputs` depend on leaf tensors that are neither inputs nor listed parameters."""
    unlisted = _unlisted_leaves(outputs, [*inputs, *parameters])
    if unlisted:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in unlisted[:3])
        raise RuntimeError(
            f"{name} uses {len(unlisted)} tensor(s) that require a gradient and are neither arguments nor listed (of "
            f"shape {shapes}{', …' if len(unlisted) > 3 else ''}): {remedy}"
        )


def _unlisted_leaves(outputs: Iterable[Tensor], listed: Sequence[Tensor]) -> list[Tensor]:
    listed_ids = {id(tensor) for tensor in listed}
    visited = {tensor.grad_fn for tensor in listed if tensor.grad_fn is not None}
    leaves = {id(output): output for output in outputs if output.requires_grad and output.grad_fn is None}
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        if is_accumulate_grad(node):
            leaf = leaf_of(node)
            leaves[id(leaf)] = leaf
            del leaf
        stack.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    unlisted = {key: leaf for key, leaf in leaves.items() if key not in listed_ids}
    leaves.clear()
    # If only the graph references a leaf, the function created it during the call, and it is no parameter.
    return [unlisted[key] for key in unlisted if sys.getrefcount(unlisted[key]) > _graph_references()]


@functools.cache
def _graph_references() -> int:
    """Return the reference count of a leaf tensor that only a graph and a dict reference, as `unlisted` above."""
    with torch.enable_grad():
        grad_fn: Any = (torch.ones(1, requires_grad=True) * 1).grad_fn
    node = grad_fn.next_functions[0][0]
    references = {0: leaf_of(node)}
    return sys.getrefcount(references[0])
