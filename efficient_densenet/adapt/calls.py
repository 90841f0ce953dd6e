"""The calls of a forward: of modules, of activations and poolings by functions, and of tensors by its author's code."""

import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, handle_torch_function

from ..kernels.activations import TABLE, spec_of_operation
from .expressions import Expressions, Table
from .layer_parts import POOL_FUNCTIONS, Call, leaf_modules


class Calls(TorchFunctionMode):
    """Records the calls that are made in its context.

    Attributes:
        calls: the modules that were called, without those inside other `leaf_modules`, and the activations and poolings
            that ran outside of them: by a function where the author's code has called one.
        asks: how often an author's code has called a tensor without an operation with arithmetic, which the dispatcher
            does not see: to read its shape, dtype or strides, to split it, to hook its gradient. It may be a branch on
            a shape, which the parts of a layer do not describe.
        features: whether each module was called with several tensors, and whether with a list.
        expressions: what the operations compute.
    """

    def __init__(self, block: nn.Module, table: Table) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.asks: Counter[str] = Counter()
        self.features: dict[nn.Module, tuple[bool, bool]] = {}
        self.expressions = Expressions(table, self._see_operation)
        self._leaves, self._depth, self._stack = set(leaf_modules(block)), 0, ExitStack()

    def __enter__(self) -> "Calls":
        for handle in (register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._exit)):
            self._stack.callback(handle.remove)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._depth += 1  # the backward calls nothing
        self._stack.close()

    def _enter(self, module: nn.Module, args: tuple) -> None:
        several = len(args) > 1 and all(isinstance(each, Tensor) for each in args)
        self.features[module] = several, bool(args) and isinstance(args[0], list | tuple)
        if module in self._leaves:
            if not self._depth:
                self.calls.append(module)
            self._depth += 1

    def _exit(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._depth -= module in self._leaves

    def _see_operation(self, name: str, values: list[Any]) -> None:
        """Record an activation or a pooling. Of a module that is not inside the block, nothing is known later."""
        if self._depth or not name.startswith(_FUNCTIONS):
            return
        pooling = next((each for each in POOL_FUNCTIONS if name.startswith(each)), "")
        call = pooling or spec_of_operation(name, *values[1:])
        if call:
            frame = sys._getframe(1)
            while frame.f_back is not None and _is_between(frame.f_code.co_filename):
                frame = frame.f_back
            self.calls.append("a module around" if frame.f_code.co_filename.startswith(_MODULES_OF_TORCH) else call)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_authors, before = _is_called_by_author(sys._getframe(1)), self.expressions.num_computed
        result = func(*args, **(kwargs or {}))
        if is_authors and self.expressions.num_computed == before:
            name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
            if not (name in _OF_DENSE_LAYERS or "dropout" in name or _is_of_channels(name, *args[1:])):
                self.asks[name] += 1
        return result


def _is_called_by_author(frame: FrameType) -> bool:
    """Whether the code that calls a function of torch is neither torch's nor ours; `frame` has called the mode."""
    if frame.f_code is handle_torch_function.__code__:  # skip the frame of a function written in Python
        frame = cast(FrameType, cast(FrameType, frame.f_back).f_back)
    return not frame.f_code.co_filename.startswith(_NOT_OF_AUTHORS)


def _is_of_channels(name: str, index: Any = None, *others: Any) -> bool:
    """Whether this call reads the number of channels, which a layer fixes, or selects channels: `x.size(1)`, `x[:,
    :4]`."""
    if name == "__getitem__" and isinstance(index, tuple) and len(index) > 1:
        return isinstance(index[1], slice) and all(each in (slice(None), ...) for each in (index[0], *index[2:]))
    return name in ("size", "narrow") and index == 1


def _is_between(file: str) -> bool:
    """Whether this is a file of torch or of ours between an operation and what has called its function."""
    return file.startswith(_NOT_OF_AUTHORS) and not file.startswith(_MODULES_OF_TORCH)


_FUNCTIONS = (*TABLE, "relu6", *POOL_FUNCTIONS)
_OF_DENSE_LAYERS = {"cat", "concat", "concatenate", "requires_grad"}
"""Calls of a layer that are not counted: its parts imply concatenations, and the modes vary requires_grad."""
_NOT_OF_AUTHORS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))
_MODULES_OF_TORCH = str(Path(nn.modules.__file__).parent)
