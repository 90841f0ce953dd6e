"""The operations that a forward runs, as PyTorch's dispatcher sees them."""

import os
import sys
from collections import Counter
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch_private import memory_key
from ..kernels.activations import ActivationSpec, spec_of_operation
from .randomness import Generators


class Recorder:
    """Records the operations that run in its context.

    Attributes:
        counts: how often each operation with arithmetic has run, and each other call of a tensor by an author's code:
            reading its shape, dtype or strides, splitting it, registering a hook on its gradient.
        written: the `memory_key` of each tensor that an operation has changed in place.
        activations: the settings of the activations that have run.
        num_computed: how many operations with arithmetic have run, whether in `counts` or not.
    """

    def __init__(self, generators: Generators) -> None:
        self.generators = generators
        self.counts: Counter[str] = Counter()
        self.written: set[int] = set()
        self.activations: set[ActivationSpec] = set()
        self.num_computed = 0
        self._stack = ExitStack()

    def __enter__(self) -> "Recorder":
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_AuthorsCalls(self))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

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
            if isinstance(value, torch.Generator):
                self.recorder.generators.add(value)
        operation = _operation(func)
        activation = spec_of_operation(operation.name, *args[1:], **kwargs)
        if activation is not None:
            self.recorder.activations.add(activation)
        for i, argument in operation.written:
            value = args[i] if i < len(args) else kwargs.get(argument)
            tensors = value if isinstance(value, (list, tuple)) else [value]
            self.recorder.written.update(memory_key(each) for each in tensors if each is not None)
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


class _Operation(NamedTuple):
    """An operation: its name, without the underscore of in-place variants; whether it has arithmetic; and the positions
    and names of the arguments that it changes."""

    name: str
    computes: bool
    written: tuple[tuple[int, str], ...]


@cache
def _operation(func: Any) -> _Operation:
    schema = func._schema
    own_name, returns = schema.name.partition("::")[2].rstrip("_"), schema.returns
    aliases = [each.alias_info for each in returns]
    is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in aliases)
    written = tuple((i, each.name) for i, each in enumerate(func._schema.arguments) if each.is_write)
    name = _ALIASES.get(own_name) or own_name
    return _Operation(name, not is_view and name not in _WITHOUT_ARITHMETIC, written)


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


_ALIASES = {"relu6": "hardtanh"}
"""Operations that run as others wherever autograd is enabled."""

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
