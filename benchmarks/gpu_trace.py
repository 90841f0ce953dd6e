"""Every launch and every byte of a training step on a GPU, counted without one, on the meta device.

A dispatch mode sees ATen's operations, a stand-in for the launcher every Triton launch; `gpu_kernels` says what they
move.
"""

import contextlib
import importlib
import inspect
import pkgutil
import sys
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

from efficient_densenet import kernels as kernel_sets
from efficient_densenet._tensors import meta_stands_for
from efficient_densenet._torch_private import backward_inside_function_modes, without_dispatch_modes
from efficient_densenet.kernels import row_tiles
from efficient_densenet.memory.meta_functions import MetaFunctions
from efficient_densenet.memory.trace import MemoryMode, MemoryTrace

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
class StepTrace(MemoryTrace):
    """The computations of a step in their order, and the memory of its tensors, gradients included."""

    computations: list[Computation] = field(default_factory=list)

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


class TracingMode(MemoryMode):
    """Adds every operation on tensors of `device_type` to a trace. `held` are the tensors from before."""

    trace: StepTrace

    def __init__(self, device_type: str = "meta", held: Iterable[Tensor] = ()) -> None:
        super().__init__("cuda" if device_type == "meta" else device_type, held, {})
        self.traced = device_type

    def new_trace(self) -> StepTrace:
        return StepTrace()

    @property
    def phase(self) -> str:
        return "backward" if self.is_backward else "forward"

    def has_run(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if any(tensor.device.type == self.traced for tensor in tensors_of((args, kwargs, output))):
            call = Call(func, args, kwargs, output)
            if not call.is_free:
                found = Computation(call.name, self.phase, False, call.launches(), call.bytes())
                self.trace.computations.append(found)

    def add_launch(self, prepared: Any, *tensors: Any) -> None:
        """The stand-in for the function that launches a Triton kernel."""
        function, grid, arguments = prepared.kernel, prepared.grid, (*tensors, *prepared.numbers)
        while not inspect.isfunction(function):  # below decorators
            function = function.fn
        named = dict(zip(inspect.signature(function).parameters, arguments, strict=False)) | prepared.constants
        shapes = tuple(tuple(value.shape) for value in named.values() if isinstance(value, torch.Tensor))
        name = function.__name__
        nbytes = launch_bytes(name, named)
        self.trace.computations.append(Computation(name, self.phase, True, 1, nbytes, grid, shapes))


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
    kind, dtype = images.device.type, AUTOCAST_DTYPES.get(precision)
    mode = TracingMode(kind, [*network.parameters(), *network.buffers(), images, labels])
    functions = MetaFunctions("cuda")
    with (
        _tensor_float_32(precision == "tf32"),
        triton_kernels(),
        _launches_replaced(mode.add_launch, run_kernels),
        meta_stands_for("cuda"),
        functions if kind == "meta" else contextlib.nullcontext(),
        mode,
    ):
        with torch.autocast("cpu" if kind == "meta" else kind, dtype, enabled=dtype is not None):
            loss = F.cross_entropy(network(images), labels)
        functions.conversions.clear()
        mode.start_backward()
        backward_inside_function_modes(loss)
    return mode.trace


def triton_modules() -> list[ModuleType]:
    """The modules of the Triton kernels, and of the host's side of them."""
    package = importlib.import_module("efficient_densenet.kernels.triton_gpu")
    return [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


@contextlib.contextmanager
def triton_kernels() -> Iterator[None]:
    """Within, the shared engine runs the Triton kernels whatever the device, with the tiles of an H100 or H200."""

    def triton_supports(values: Tensor) -> bool:  # a mock would keep its arguments, and their memory
        return values.dtype != torch.double

    tiles: Any = next(module for module in triton_modules() if hasattr(module, "OF_H100"))
    with (
        mock.patch.object(kernel_sets, "triton_supports", triton_supports),
        mock.patch.object(row_tiles, "META_TILES", sys.maxsize),  # each tile's launches count
        _replaced("device_limits", lambda function: lambda device: tiles.OF_H100),
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
