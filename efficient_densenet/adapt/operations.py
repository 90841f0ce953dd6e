"""The operations that a forward runs, as PyTorch's dispatcher sees them."""

from collections import Counter
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch_private import memory_key
from .randomness import Generators


class Recorder:
    """Records what runs in its context.

    Attributes:
        counts: how often each operation that computes has run, and each reading of values without an operation.
        written: the `memory_key` of each tensor that an operation has changed in place.
    """

    def __init__(self, generators: Generators) -> None:
        self.generators = generators
        self.counts: Counter[str] = Counter()
        self.written: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> "Recorder":
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_Readings(self))
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
        for i, argument in operation.written:
            value = args[i] if i < len(args) else kwargs.get(argument)
            tensors = value if isinstance(value, (list, tuple)) else [value]
            self.recorder.written.update(memory_key(each) for each in tensors if each is not None)
        result = func(*args, **kwargs)
        if operation.computes and not (_counts_batches(operation, args) or _drops_nothing(operation, args)):
            dtype = f" in {result.dtype}" if isinstance(result, Tensor) else ""
            self.recorder.counts[operation.name + dtype] += 1
        return result


class _Readings(TorchFunctionMode):
    """Sees the methods that return a tensor's values without an operation."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READINGS:
            self.recorder.counts[name] += 1
        return func(*args, **(kwargs or {}))


class _Operation(NamedTuple):
    """What is to be known of an operation: its name, the same in place; whether it computes anything; the numbers and
    names of the arguments that it changes."""

    name: str
    computes: bool
    written: tuple[tuple[int, str], ...]


@cache
def _operation(func: Any) -> _Operation:
    name, returns = func._schema.name.partition("::")[2].rstrip("_"), func._schema.returns
    aliases = [each.alias_info for each in returns]
    is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in aliases)
    written = tuple((i, each.name) for i, each in enumerate(func._schema.arguments) if each.is_write)
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
    """Whether this is a dropout in evaluation mode, which is an operation in inference mode only."""
    return operation.name.endswith("dropout") and bool(args) and args[-1] is False


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
_READINGS = {"tolist", "numpy", "__array__", "data_ptr"}
