"""Behavior that depends on a compiler, an exporter or a tracer, and the private APIs of PyTorch's compiler.

`tests/test_torch_private.py` tests each function, so that a PyTorch release that changes one of them fails there.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.fx import Proxy

Function = TypeVar("Function", bound=Callable)


def is_exporting(training: bool) -> bool:
    """Return True while a model is traced or exported. `training` is the training mode of the model."""
    if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():  # pyright: ignore[reportPrivateImportUsage] (public)
        return True
    if hasattr(torch.compiler, "_is_exporting_flag"):  # PyTorch 2.11's compiler traces is_exporting() as True
        return torch.compiler._is_exporting_flag
    # PyTorch 2.6 has no such flag. There, a compilation without dynamo, or of a model in eval mode, is an export.
    return torch.compiler.is_compiling() and not (torch.compiler.is_dynamo_compiling() and training)


CHECKPOINTS_UPDATE_ONCE = torch.__version__ >= "2.9"
"""Whether a compiled `torch.utils.checkpoint` updates running statistics in the forward only."""

READS_CONVERTED_MODULES = torch.__version__ >= "2.9"
"""Whether the compiler traces how converted modules are read. Without it, the author's forward is compiled."""


def may_read_converted_modules() -> bool:
    """Return False under a compiler that cannot trace how converted modules are read."""
    return READS_CONVERTED_MODULES or not torch.compiler.is_compiling()


def constant_to_compilers(function: Function) -> Function:
    """Make compilers call `function` while they trace, and take its result as a constant.

    `torch.compiler.assume_constant_result` does this too, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def specialized(value: float) -> float:
    """Return `value`, which a compiler then takes as a constant, even if it has seen other values of this argument."""
    return float(f"{value}") if torch.compiler.is_compiling() else value  # the text adds a guard on symbols


def cached_in_eager_mode(function: Function) -> Function:
    """Cache the results of `function` by its arguments, except under a compiler, where arguments may be symbolic."""
    cached = functools.lru_cache(maxsize=4096)(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return (function if torch.compiler.is_compiling() else cached)(*args, **kwargs)

    return cast(Function, wrapper)


def records_sizes(x: Any) -> bool:
    """Return True while a tracer or a compiler records the operations on `x`, whose sizes may then be symbolic."""
    is_tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] (public)
    return is_tracing or torch.compiler.is_compiling() or isinstance(x, Proxy)


def skipped_by_compilers(function: Function) -> Function:
    """Make compilers skip `function`, and the functions that it calls, where it is called outside of a compiled graph.

    `torch.compiler.disable` does this too, but imports the compiler.
    """
    disabled = functools.cache(lambda: torch.compiler.disable(function))

    @functools.wraps(function)
    def skipped(*args: Any, **kwargs: Any) -> Any:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return cast(Function, skipped)
