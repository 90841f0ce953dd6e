"""Every launch and every byte of a training step on a GPU, counted without one, on the meta device.

A dispatch mode sees ATen's operations, a stand-in for the launcher every Triton launch; `gpu_kernels` says what they
move.
"""

import contextlib
import functools
import importlib
import inspect
import pkgutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_kernels import Call, launch_bytes, tensors_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from efficient_densenet import kernels as kernel_sets
from efficient_densenet._tensors import CHANNELS_LAST, memory_format_of
from efficient_densenet._torch_private import without_dispatch_modes

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALLOCATION_BYTES = 512
"""PyTorch's allocator for CUDA rounds sizes up to a multiple of this."""
DEVICE_LIMITS = {"multiprocessors": 132, "shared_memory": 228 << 10, "shared_memory_of_a_block": 227 << 10}
"""Of an H200, for which the Triton kernels choose their tiles here."""


@dataclass(frozen=True)
class Computation:
    """One operation of ATen, or one launch of a Triton kernel with its grid and the shapes of its tensors."""

    name: str
    phase: str
    is_triton: bool
    launches: int
    bytes: int
    grid: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass
class StepTrace:
    """What a step asks of the device, in order, and the most bytes that its tensors, gradients too, held at once."""

    computations: list[Computation] = field(default_factory=list)
    tensor_peak: int = 0

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.computations)

    def launches(self, phase: str | None = None, is_triton: bool | None = None) -> int:
        return sum(
            each.launches
            for each in self.computations
            if phase in (None, each.phase) and is_triton in (None, each.is_triton)
        )

    def by_name(self, phase: str | None = None) -> Counter[str]:
        """The launches of all computations of one name."""
        launches = Counter[str]()
        for each in self.computations:
            launches[each.name] += each.launches if phase in (None, each.phase) else 0
        return launches


class TracingMode(TorchDispatchMode):
    """Adds every operation on tensors of `device_type` to a trace, and runs it. `held` are the tensors from before.

    An operator of this package runs its implementation rather than its fake one, so that the trace sees what is in it.
    """

    def __init__(self, device_type: str = "meta", held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.trace, self.phase, self.device_type = StepTrace(), "forward", device_type
        self.memory = _Memory(self.trace, held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "efficient_densenet":
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # an operation that consists of others
                return func.decompose(*args, **kwargs)
        output = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.convolution and self.device_type == "meta":
            output = _as_by_cudnn(output, *args[:2])
        if any(tensor.device.type == self.device_type for tensor in tensors_of((args, kwargs, output))):
            call = Call(func, args, kwargs, output)
            if not call.is_free:
                self.trace.computations.append(Computation(call.name, self.phase, False, call.launches(), call.bytes()))
            for tensor in tensors_of(output):
                self.memory.add(tensor)
        return output

    def add_launch(self, prepared: Any, *tensors: Any) -> None:
        """The stand-in for the function that launches a Triton kernel."""
        function, grid, arguments = prepared.kernel, prepared.grid, (*tensors, *prepared.numbers)
        while not inspect.isfunction(function):  # below decorators
            function = function.fn
        named = dict(zip(inspect.signature(function).parameters, arguments, strict=False)) | prepared.constants
        shapes = tuple(tuple(value.shape) for value in named.values() if isinstance(value, torch.Tensor))
        name = function.__name__
        self.trace.computations.append(
            Computation(name, self.phase, True, 1, launch_bytes(name, grid, named), grid, shapes)
        )


class _Memory:
    """The bytes of the tensors that live, by their storages, as PyTorch's allocator for CUDA would round them."""

    def __init__(self, trace: StepTrace, held: Iterable[Tensor]) -> None:
        self.trace, self.current, self.held = trace, 0, list(held)
        self.known = {tensor.untyped_storage()._cdata for tensor in self.held}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.known:
            return
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self.known.add(address)
        self.current += size
        self.trace.tensor_peak = max(self.trace.tensor_peak, self.current)
        weakref.finalize(storage, self._remove, address, size).atexit = False

    def _remove(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.current -= size


def _as_by_cudnn(output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The output of a convolution in channels_last, if its input or its weight is: the meta device's is contiguous."""
    memory_formats = memory_format_of(x), memory_format_of(weight)
    found = [each for each in memory_formats if each in CHANNELS_LAST.values()]
    return output.contiguous(memory_format=found[0]) if found else output


# A step on the meta device


def trace_step(network: nn.Module, images: Tensor, precision: str = "float32", run_kernels: bool = False) -> StepTrace:
    """The forward, the cross entropy and the backward of a step whose gradients are None before it.

    Args:
        network: on the meta device, or where the step really runs.
        images: on the network's device.
        precision: float32, tf32, bf16 or fp16.
        run_kernels: launch the Triton kernels too, or run them by Triton's interpreter.
    """
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    mode = TracingMode(images.device.type, [*network.parameters(), *network.buffers(), images, labels])
    with (
        _tensor_float_32(precision == "tf32"),
        _triton_kernels(),
        _launches_replaced(mode.add_launch, run_kernels),
        mode,
    ):
        with _autocast(images.device.type, AUTOCAST_DTYPES.get(precision)):
            loss = F.cross_entropy(network(images), labels)
        mode.phase = "backward"
        loss.backward()
    return mode.trace


def triton_modules() -> list[ModuleType]:
    """The modules of the Triton kernels, and of the host's side of them."""
    package = importlib.import_module("efficient_densenet.kernels.triton_gpu")
    return [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


@contextlib.contextmanager
def _triton_kernels() -> Iterator[None]:
    """Within, the shared engine runs the Triton kernels whatever the device, with the tiles of `DEVICE_LIMITS`."""

    def triton_supports(values: Tensor) -> bool:  # a mock would keep its arguments, and their memory
        return values.dtype != torch.double

    tiles: Any = next(module for module in triton_modules() if hasattr(module, "DeviceLimits"))
    limits = tiles.DeviceLimits(**DEVICE_LIMITS)
    with (
        mock.patch.object(kernel_sets, "triton_supports", triton_supports),
        _replaced("device_limits", lambda function: lambda device: limits),
    ):
        yield


@contextlib.contextmanager
def _launches_replaced(replacement: Callable[..., None], also_launch: bool) -> Iterator[None]:
    """Within, `replacement` is called instead of the function that launches Triton kernels, or before it."""

    def stand_in(launch: Callable[..., Any]) -> Callable[..., None]:
        def launched(*arguments: Any, **constants: Any) -> None:
            replacement(*arguments, **constants)
            if also_launch:
                with without_dispatch_modes():  # the interpreter's own operations are none of the step's
                    launch(*arguments, **constants)

        return launched

    with _replaced("launch", stand_in):
        yield


@contextlib.contextmanager
def _replaced(name: str, stand_in: Callable[[Any], Any]) -> Iterator[None]:
    """Within, each function of this name is `stand_in(function)`, wherever a module of Triton's has imported it."""
    with contextlib.ExitStack() as patches:
        for module in triton_modules():
            if callable(function := getattr(module, name, None)):
                patches.enter_context(mock.patch.object(module, name, stand_in(function)))
        yield


@contextlib.contextmanager
def _tensor_float_32(allowed: bool) -> Iterator[None]:
    """Within, products of float32 are computed in TF32, or else exactly."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _autocast(device_type: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    if device_type == "meta" and dtype is not None:
        return _AutocastOfMeta(dtype).enabled()
    return torch.autocast("cpu" if device_type == "meta" else device_type, dtype, enabled=dtype is not None)


class _AutocastOfMeta:
    """An autocast for the meta device, which has none: the queries answer as they would on CUDA, and the functions of a
    DenseNet that autocast changes get their operands in the dtype that they have there."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype: torch.dtype | None = dtype

    @contextlib.contextmanager
    def enabled(self) -> Iterator[None]:
        with (
            mock.patch.object(torch.amp, "is_autocast_available", return_value=True),
            mock.patch.object(torch, "is_autocast_enabled", self._is_enabled),
            mock.patch.object(torch, "get_autocast_dtype", self._get_dtype),
            mock.patch.object(torch, "autocast", self._disabled),
            mock.patch.object(F, "conv2d", self._casting(F.conv2d)),
            mock.patch.object(F, "linear", self._casting(F.linear)),
            mock.patch.object(F, "cross_entropy", self._casting(F.cross_entropy, torch.float32)),
        ):
            yield

    def _is_enabled(self, device_type: str) -> bool:
        return self.dtype is not None

    def _get_dtype(self, device_type: str) -> torch.dtype | None:
        return self.dtype

    @contextlib.contextmanager
    def _disabled(self, device_type: str, enabled: bool) -> Iterator[None]:
        """In the place of `torch.autocast`, which the engines use to turn it off."""
        assert not enabled
        before, self.dtype = self.dtype, None
        try:
            yield
        finally:
            self.dtype = before

    def _casting(self, function: Callable[..., Tensor], always: torch.dtype | None = None) -> Callable[..., Tensor]:
        """`function` with its floating-point tensors in autocast's dtype, or in `always`."""

        @functools.wraps(function)
        def cast(*arguments: Any, **options: Any) -> Tensor:
            if self.dtype is not None:
                to = always or self.dtype
                arguments = tuple(
                    each.to(to) if isinstance(each, Tensor) and each.is_floating_point() else each for each in arguments
                )
            return function(*arguments, **options)

        return cast
