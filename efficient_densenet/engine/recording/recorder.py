"""What a run does to memory: allocations, operations and launches, with tensors as places in numbered memories."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..._torch_private import run_parts
from ...kernels import launches
from ...kernels.launches import Place

_aten = torch.ops.aten
_EMPTY = {
    *(_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default),
}
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_UNPREDICTABLE = torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


MAX_EVENTS = 10_000
"""The most events of a run that is recorded. Longer runs, of many tiles, are limited by the device, not by the host."""


class Allocation(NamedTuple):
    """A memory that the run allocates."""

    memory: int


class Operation(NamedTuple):
    """A call of an ATen operation; `results` are the memories of its new tensors, by their position among all."""

    function: Any
    args: Any
    kwargs: Any
    results: Sequence[tuple[int, int]] = ()


class Launch(NamedTuple):
    """A launch of a kernel; `kind` is the class of launches to which it belongs."""

    kind: type[launches.Launches]
    kernel: Any
    arguments: Sequence[Any]


class Memory:
    """A storage, with the layout of its first tensor, which fills it unless it is an external's.

    `first` and `last` are the numbers of the events that use it first and last.
    """

    def __init__(self, tensor: Tensor, event: int) -> None:
        self.dtype, self.size, self.stride = tensor.dtype, tuple(tensor.shape), tensor.stride()
        self.address, self.nbytes = tensor.data_ptr(), tensor.untyped_storage().nbytes()
        self.first = self.last = event

    def place(self, number: int) -> Place:
        """The place of the first tensor."""
        return Place(number, 0, self.dtype, self.size, self.stride)


class Recorder(TorchDispatchMode):
    """Sees a run whose tensors come from `externals`, of which those in `written` alone are written.

    Attributes:
        memories: of the externals, then those that the run allocates.
        events: what the run does, in order.
        overlaps: the distance in bytes of each two externals that share some of their memory. A tensor within both
            is recorded as a part of the first, so the program is right only for externals at these distances.
        reason: why the run cannot be replayed, "" if it can.
    """

    def __init__(self, externals: Sequence[Tensor], written: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.written = {i for i, each in enumerate(externals) if any(each is other for other in written)}
        self.events: list[Allocation | Operation | Launch] = []
        self.memories = [Memory(each, 0) for each in externals]
        self.num_externals = len(externals)
        self.device = externals[0].device
        self.reason = ""
        self._spans: dict[int, list[tuple[int, int, int]]] = {}
        self._storages: dict[int, tuple[int, Any]] = {}
        for number, each in enumerate(externals):
            self._spans.setdefault(_storage_key(each), []).append((number, *_span(each)))
        self.overlaps = list(self._overlaps())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks when the class is defined. If True, it imports its compiler, 150 MiB, at the first operation."""
        return False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """In this context and thread, everything is recorded."""
        with self, launches.seen_by(self):
            yield

    def place(self, tensor: Tensor) -> Place:
        """The place of a tensor, which the next event uses."""
        number, memory = self._memory_of(tensor)
        if tensor.dtype is not memory.dtype:
            raise _CannotRecordError(f"memory of {memory.dtype} is read as {tensor.dtype}")
        memory.last = len(self.events)
        offset = tensor.data_ptr() - memory.address if tensor.numel() else 0  # empty ones have no address
        return Place(number, offset, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def argument(self, tensor: Tensor, offset: int = 0) -> Place | None:
        """The place `offset` bytes after the start of a tensor, for a kernel."""
        try:
            place = self.place(tensor)
        except _CannotRecordError as error:
            self._refuse(error)
            return None
        return place._replace(offset=place.offset + offset)

    def launched(self, kind: type[launches.Launches], kernel: Any, arguments: Sequence[Any]) -> None:
        self.events.append(Launch(kind, kernel, arguments))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.reason:
            return func(*args, **kwargs)
        with self:  # below autograd a mode sees operations that consist of others
            output = run_parts(func, args, kwargs, self.device.type)
        if output is not NotImplemented:
            return output
        output = func(*args, **kwargs)
        try:
            self._operation(func, args, kwargs, output)
        except _CannotRecordError as error:
            self._refuse(error)
        return output

    def _operation(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_meta:
            return  # it has a layout only, and no event can use it
        if func in _EMPTY:
            self._allocation(output)
        elif func in _ZEROS:
            self._allocation(output)
            self._event(_aten.zero_.default, (output,))
        elif func in _COPIES and not self._is_known(output) and _copies_within_device(args, kwargs):
            self._allocation(output)
            self._event(_aten.copy_.default, (output, args[0]))
        elif not _is_view(func):
            self._check(func, args, kwargs)
            self._event(func, args, kwargs, output)

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        if any(tag in func.tags for tag in _UNPREDICTABLE):
            raise _CannotRecordError(f"{func} depends on random numbers or on values")
        schema = func._schema.arguments
        given = [*zip(schema, args, strict=False), *((each, kwargs.get(each.name)) for each in schema)]
        for argument, value in given:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in value if isinstance(value, list | tuple) else [value]:
                number = self.place(tensor).memory if isinstance(tensor, Tensor) else self.num_externals
                if number < self.num_externals and number not in self.written:
                    raise _CannotRecordError(f"{func} changes a tensor that the engine was given")

    def _event(self, func: Any, args: Any, kwargs: Any = None, output: Any = None) -> None:
        if len(self.events) >= MAX_EVENTS:
            raise _CannotRecordError(f"it has more than {MAX_EVENTS} events")
        args, kwargs = mapped(args, Tensor, self.place), mapped(kwargs or {}, Tensor, self.place)
        results = []
        for i, each in enumerate(output if isinstance(output, list | tuple) else [output]):
            if isinstance(each, Tensor):
                if not self._is_known(each):
                    results.append((i, self._remember(each)))
            elif each is not None:
                raise _CannotRecordError(f"{func} returns a value")
        self.events.append(Operation(func, args, kwargs, results))

    def _allocation(self, tensor: Tensor) -> None:
        number = self._remember(tensor)
        self.events.append(Allocation(number))

    def _remember(self, tensor: Tensor) -> int:
        """The number of the memory of a new tensor."""
        if type(tensor) is not Tensor or tensor.device != self.device or tensor.storage_offset():
            raise _CannotRecordError(f"a new tensor is a {type(tensor).__name__} on {tensor.device}")
        key, storage, number = _storage_key(tensor), tensor.untyped_storage(), len(self.memories)
        # A callback that is no Python code, in which the KeyboardInterrupt of a signal would be lost.
        self._storages[key] = number, weakref.ref(storage, partial(self._storages.pop, key))
        self.memories.append(Memory(tensor, len(self.events)))
        return number

    def _memory_of(self, tensor: Tensor) -> tuple[int, Memory]:
        key = _storage_key(tensor)
        number, _ = self._storages.get(key, (None, None))
        if number is None:
            start, stop = _span(tensor)
            spans = self._spans.get(key, ())
            number = next((number for number, first, last in spans if first <= start and stop <= last), None)
        if number is None:
            raise _CannotRecordError("a tensor is neither given nor allocated in the run")
        return number, self.memories[number]

    def _is_known(self, tensor: Tensor) -> bool:
        return _storage_key(tensor) in self._storages or _storage_key(tensor) in self._spans

    def _overlaps(self) -> Iterator[tuple[int, int, int]]:
        for spans in self._spans.values():
            for i, (number, start, stop) in enumerate(spans):
                for other, first, last in spans[:i]:
                    if start < last and first < stop:
                        yield other, number, start - first

    def _refuse(self, error: Exception) -> None:
        self.reason = self.reason or str(error)


def mapped(arguments: Any, cls: type, function: Callable[[Any], Any]) -> Any:
    """The arguments of an operation or a launch, with `function` applied to those of this class. Some are lists."""
    if isinstance(arguments, cls):
        return function(arguments)
    if isinstance(arguments, dict):
        return {name: mapped(each, cls, function) for name, each in arguments.items()}
    if isinstance(arguments, list | tuple):
        return [mapped(each, cls, function) for each in arguments]
    return arguments


class _CannotRecordError(Exception):
    pass


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first element, and after its last one."""
    start = tensor.data_ptr()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (elements * tensor.itemsize if tensor.numel() else 0)


def _is_view(func: Any) -> bool:
    """Whether all that an operation returns are views of its arguments, which it does not change."""
    returns = func._schema.returns
    aliases = [each.alias_info for each in returns]
    return func is _aten._unsafe_view.default or (
        bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    )


def _copies_within_device(args: Any, kwargs: Any) -> bool:
    return kwargs.get("device") in (None, args[0].device)
