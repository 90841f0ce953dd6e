"""The tensors that a function computes with besides its arguments."""

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import CellType

from torch import Tensor, nn

from ..torch_private import is_leaf_node
from .trees import flatten


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
    """The same, and the modules that a plain function mentions: in its closure, its defaults or its globals."""
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__self__", None) is not None:
        return modules_of(function)
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    mentioned = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    reached = flatten([cells, function.__defaults__, mentioned])[0]
    return [value for value in reached if isinstance(value, nn.Module)]


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
            leaves[id(node.variable)] = node.variable
        stack.extend(earlier for earlier, _ in node.next_functions if earlier is not None)
    return [leaf for key, leaf in leaves.items() if key not in known]
