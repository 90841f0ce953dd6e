"""What other code has changed about modules, so that an engine that does not call them would compute something else:
hooks, methods set on a module, patches of torch's classes and functions, function modes, parametrizations."""

from collections.abc import Collection
from itertools import starmap
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._compilers import constant_to_compilers
from .._dimensions import classes
from .._torch_private import has_global_module_hooks, name_of_function_mode, why_not_shared
from ..kernels.activations import NAMES, TABLE
from .sharded import why_sharded

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
METHODS = "forward", "_conv_forward", "_check_input_dim"
_KNOWN_CLASSES = (
    *NAMES,
    *(each for name in ("Conv", "BatchNorm", "AvgPool", "MaxPool") for each in classes(name)),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)


_KNOWN_FUNCTIONS = (
    *TABLE,
    "batch_norm",
    *(f"{kind}{n}d" for kind in ("conv", "avg_pool", "max_pool") for n in (1, 2, 3)),
)


def _of_torch(function: Any) -> Any:
    """`function` if torch has defined it; None if other code has put it into torch's class or module."""
    is_builtin = isinstance(function, BuiltinFunctionType)
    module = function.__module__ if is_builtin else getattr(function, "__globals__", {}).get("__name__", "")
    return function if f"{module}.".startswith("torch.") else None


_FUNCTIONS: list[tuple[Any, str]] = [
    *((cls, name) for cls in _KNOWN_CLASSES for name in METHODS if hasattr(cls, name)),
    *((F, name) for name in _KNOWN_FUNCTIONS if hasattr(F, name)),
    (torch, "cat"),
]
_TORCHS = [_of_torch(getattr(owner, name)) for owner, name in _FUNCTIONS]


def must_be_called(module: nn.Module) -> bool:
    """Whether `module` has hooks, or methods set on the instance, that run only if it is called."""
    attributes = module.__dict__
    return any(name in attributes for name in METHODS) or any(attributes[name] for name in HOOKS)


def why_not_module(module: nn.Module, sharded: Collection[nn.Module] = ()) -> str | None:
    """Why a layer with this module inside cannot run without calling it, or None."""
    name = type(module).__name__
    if must_be_called(module) and module not in sharded:
        hooked = f"found a hook on, or a new forward of, a {name} inside a layer, which the engine would not call"
        return why_sharded(module) or hooked
    return why_not_parametrized(module)


def why_not_parametrized(module: nn.Module) -> str | None:
    """Why a layer with this module inside cannot run by its parts, whose weights are parameters, or None."""
    name = type(module).__name__
    return f"found a parametrization of a {name} inside a layer" if "parametrizations" in module._modules else None


def why_not_global_changes() -> str | None:
    """A hook on all modules, a function mode, or a patch of one of torch's classes or functions, which the shared
    engine would not call; or what this PyTorch lacks."""
    if why_not_shared() is not None:
        return why_not_shared()
    if has_global_module_hooks():
        return "found a hook on all modules, which the shared engine does not call inside a layer"
    if function_mode() is not None:
        return f"found a {function_mode()}, a function mode, which would not see what the shared engine computes"
    name = patched_function()
    return None if name is None else f"found a new {name}, which the shared engine would not call"


function_mode = constant_to_compilers(name_of_function_mode)
"""Compilers trace a function mode by themselves."""


@constant_to_compilers
def patched_function() -> str | None:
    """The name of a function that other code has replaced in a class or module of torch, such as
    "Conv2d._conv_forward" or "torch.cat"; None if there is none."""
    now = list(starmap(getattr, _FUNCTIONS))
    changed = () if now == _TORCHS else zip(_FUNCTIONS, now, _TORCHS, strict=True)
    return next((f"{owner.__name__}.{name}" for (owner, name), each, torchs in changed if each is not torchs), None)
