"""The operations that a forward runs, as PyTorch's dispatcher sees them."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels.activations import TABLE, ActivationSpec, spec_of_operation
from .errors import SideEffectError
from .layer_parts import POOL_FUNCTIONS, Call, leaf_modules


class Recorder:
    """Records the operations that run in its context, and the calls of the modules inside `block`.

    Attributes:
        calls: the modules that were called, without those inside other `leaf_modules`, and the activations and poolings
            that ran outside of them: by a function where the author's code has called one.
        counts: how often each operation with arithmetic has run, and each other call of a tensor by an author's code:
            reading its shape, dtype or strides, splitting it, registering a hook on its gradient.
        num_computed: how many operations with arithmetic have run, whether in `counts` or not.
        features: whether each module was called with several tensors, and whether with a list.
    """

    def __init__(self, block: nn.Module | None = None) -> None:
        self.calls: list[Call] = []
        self._leaves = set() if block is None else set(leaf_modules(block))
        self._depth = 0
        self.counts: Counter[str] = Counter()
        self.num_computed = 0
        self.features: dict[nn.Module, tuple[bool, bool]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Recorder":
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_AuthorsCalls(self))
        if self._leaves:
            for handle in (register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._exit)):
                self._stack.callback(handle.remove)
        return self

    def __exit__(self, *exc: Any) -> None:
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

    def see_function(self, call: ActivationSpec | str) -> None:
        """Record an activation or a pooling. Of a module that is not inside the block, nothing is known later."""
        if not self._depth:
            frame = sys._getframe(1)
            while frame.f_back is not None and _is_between(frame.f_code.co_filename):
                frame = frame.f_back
            of_torch = frame.f_code.co_filename.startswith(_MODULES_OF_TORCH)
            self.calls.append("a module around" if of_torch else call)

    @property
    def forwards_of_norms(self) -> int:
        """How often the forward of a batch norm has run."""
        return sum(n for name, n in self.counts.items() if "batch_norm" in name and "backward" not in name)


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and value is not torch.default_generator:
                raise SideEffectError("draws random numbers from a Generator, which a recomputation would draw anew")
        operation = _operation(func)
        function = operation.pooling
        if operation.own_name in _ACTIVATIONS:
            function = spec_of_operation(operation.own_name, *_arguments(func, args, kwargs))
        if function:
            self.recorder.see_function(function)
        result = func(*args, **kwargs)
        self.recorder.num_computed += operation.computes
        if operation.computes and not (_counts_batches(operation, args) or _drops_nothing(operation, args)):
            dtype = f" in {result.dtype}" if isinstance(result, Tensor) else ""
            self.recorder.counts[operation.name + dtype] += 1
        return result


class _AuthorsCalls(TorchFunctionMode):
    """Counts an author's calls of tensors that run no operation with arithmetic, which the dispatcher does not see.
    They may be a branch on a shape, or a hook on a gradient, which the parts of a layer do not describe."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_authors, before = _is_called_by_author(sys._getframe(1)), self.recorder.num_computed
        result = func(*args, **(kwargs or {}))
        if is_authors and self.recorder.num_computed == before:
            name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
            if not (name in _OF_DENSE_LAYERS or "dropout" in name or _is_of_channels(name, *args[1:])):
                self.recorder.counts[name] += 1
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


def _arguments(func: Any, args: tuple, kwargs: dict) -> Iterator[Any]:
    """The arguments of an operation after the first, those that were left out too."""
    for i, argument in enumerate(func._schema.arguments):
        if i:
            yield args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)


class _Operation(NamedTuple):
    """An operation: its name, without the underscore of in-place variants, and the name by which it is counted; and
    whether it has arithmetic."""

    own_name: str
    name: str
    computes: bool

    @property
    def pooling(self) -> str:
        """The name of the pooling function, or ""."""
        return next((name for name in POOL_FUNCTIONS if self.name.startswith(name)), "")


@cache
def _operation(func: Any) -> _Operation:
    schema = func._schema
    own_name, returns = schema.name.partition("::")[2].rstrip("_"), schema.returns
    aliases = [each.alias_info for each in returns]
    is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in aliases)
    name = _ALIASES.get(own_name) or own_name
    return _Operation(own_name, name, not is_view and name not in _WITHOUT_ARITHMETIC)


def _counts_batches(operation: _Operation, args: tuple) -> bool:
    """Whether this adds to a norm's `num_batches_tracked`, which some norms do in some modes only."""
    return (
        operation.name == "add"
        and isinstance(args[0], Tensor)
        and args[0].dim() == 0
        and not args[0].is_floating_point()
    )


def _drops_nothing(operation: _Operation, args: tuple) -> bool:
    """Whether this is a dropout in evaluation mode or of rate 0, which runs as an operation only in inference mode."""
    return operation.name.endswith("dropout") and len(args) == 3 and not (args[1] and args[2])


def _is_between(file: str) -> bool:
    """Whether this is a file of torch or of ours between an operation and what has called its function."""
    return file.startswith(_NOT_OF_AUTHORS) and not file.startswith(_MODULES_OF_TORCH)


_ALIASES = {"relu6": "hardtanh"}
"""Operations that run as others wherever autograd is enabled."""

_ACTIVATIONS = {*TABLE, *_ALIASES}
_WITHOUT_ARITHMETIC = {
    "cat",
    "clone",
    "copy",
    "_to_copy",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
}
_WITHOUT_ARITHMETIC |= {"new_empty_strided", "_unsafe_view", "_reshape_copy"}
_OF_DENSE_LAYERS = {"cat", "concat", "concatenate", "requires_grad"}
"""Calls of a layer that are not counted: its parts imply concatenations, and the trial varies requires_grad."""
_NOT_OF_AUTHORS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))
_MODULES_OF_TORCH = str(Path(nn.modules.__file__).parent)
