"""The modules and parameters that a function uses besides its arguments."""

import functools
from collections.abc import Callable, Iterable
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_MAX_DEPTH = 6
_MAX_LENGTH = 1000
"""Length above which a collection is taken for data and not searched."""


def reachable_modules(function: Callable) -> list[nn.Module]:
    """Return the module that `function` is or belongs to. For any other function, return the modules that it references
    directly or not: by closure, default, global, attribute or `functools.partial`."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return [owner]
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
        return [*closure, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *global_values]
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


def with_submodules(values: Iterable[Any]) -> list[nn.Module]:
    """Return the modules among `values` with all their submodules, each once."""
    modules: dict[nn.Module, None] = {}
    remaining = [value for value in values if isinstance(value, nn.Module)]
    while remaining:  # takes half the time of nn.Module.modules
        module = remaining.pop()
        if module not in modules:
            modules[module] = None
            remaining.extend(child for child in module._modules.values() if child is not None)
    return list(modules)


def parameters_of(*modules: nn.Module) -> list[Tensor]:
    """Return the parameters of `modules`, also of `nn.DataParallel` replicas, whose `parameters()` is empty."""
    parameters = {}
    for module in chain.from_iterable(m.modules() for m in modules):
        replicated = getattr(module, "_former_parameters", {})
        for tensor in chain(module._parameters.values(), replicated.values()):
            if tensor is not None:
                parameters[id(tensor)] = tensor
    return list(parameters.values())


def function_name(function: Callable) -> str:
    """Return the name of `function` for a message."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    return getattr(function, "__qualname__", type(function).__name__)
