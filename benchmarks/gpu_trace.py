"""Every launch and every byte of a step, counted without a GPU: ATen's operations as a dispatch mode sees them, and the
Triton launches as a stand-in for the launcher records them. `gpu_aten` and `gpu_kernels` have the rules."""

import contextlib
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
from gpu_aten import Call, tensors_of
from gpu_kernels import Traffic, model_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from efficient_densenet._tensors import CHANNELS_LAST, memory_format_of
from efficient_densenet._torch_private import without_dispatch_modes

ALLOCATION_BYTES = 512
"""PyTorch's allocator for CUDA rounds sizes up to a multiple of this."""


@dataclass(frozen=True)
class Computation:
    """One operation of ATen, or one launch of a Triton kernel with its grid and the shapes of its tensors.

    `product_dtype` is of the factors, where `flops` are those of a product.
    """

    name: str
    phase: str
    is_triton: bool
    launches: int
    traffic: tuple[Traffic, ...]
    flops: int = 0
    product_dtype: torch.dtype | None = None
    grid: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()

    def bytes(self, l2_bytes: int) -> int:
        """What it moves through memory, on a device with such an L2 cache."""
        return sum(each.total(l2_bytes) for each in self.traffic)


@dataclass
class StepTrace:
    """What a step asks of the device, in order, what it asks of the host beside that, and the memory of its tensors.

    Attributes:
        computations: all that costs a launch.
        host_only_calls: views and allocations.
        tensor_peak: the most bytes that tensors of the step held at once, its gradients among them.
    """

    computations: list[Computation] = field(default_factory=list)
    host_only_calls: int = 0
    tensor_peak: int = 0

    def launches(self, phase: str | None = None, is_triton: bool | None = None) -> int:
        return sum(
            each.launches
            for each in self.computations
            if phase in (None, each.phase) and is_triton in (None, each.is_triton)
        )

    def bytes(self, l2_bytes: int) -> int:
        return sum(each.bytes(l2_bytes) for each in self.computations)

    def by_name(self, l2_bytes: int) -> list[tuple[str, int, int]]:
        """(name, launches, bytes) of all computations of one name, those with most bytes first."""
        launches, sizes = Counter[str](), Counter[str]()
        for each in self.computations:
            launches[each.name] += each.launches
            sizes[each.name] += each.bytes(l2_bytes)
        return [(name, launches[name], size) for name, size in sizes.most_common()]


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
            self._add(Call(func, args, kwargs, output))
        return output

    def _add(self, call: Call) -> None:
        if call.is_host_only:
            self.trace.host_only_calls += 1
        else:
            count_flops = flop_registry.get(call.func.overloadpacket)
            flops = count_flops(*call.args, **call.kwargs, out_val=call.output) if count_flops else 0
            self.trace.computations.append(
                Computation(
                    name=call.name,
                    phase=self.phase,
                    is_triton=False,
                    launches=call.launches(),
                    traffic=tuple(call.traffic()),
                    flops=flops,
                    product_dtype=tensors_of(call.args)[0].dtype if flops else None,
                )
            )
        for tensor in tensors_of(call.output):
            self.memory.add(tensor)

    def add_launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """The stand-in for the function that launches a Triton kernel."""
        function = kernel
        while not inspect.isfunction(function):  # below decorators
            function = function.fn
        name, parameters = function.__name__, inspect.signature(function).parameters
        model, named = model_of(name), dict(zip(parameters, arguments, strict=False)) | constants
        tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        flops = model.flops(named)
        factor = next((tensors[each] for each in ("weight", "grad_output", "values") if each in tensors), None)
        self.trace.computations.append(
            Computation(
                name=name,
                phase=self.phase,
                is_triton=True,
                launches=1,
                traffic=tuple(model.traffic(name, grid, named)),
                flops=flops,
                product_dtype=factor.dtype if flops and factor is not None else None,
                grid=grid,
                shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
            )
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


def triton_modules() -> list[ModuleType]:
    """The modules of the Triton kernels, and of the host's side of them."""
    package = importlib.import_module("efficient_densenet.kernels.triton_gpu")
    return [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


@contextlib.contextmanager
def launches_replaced(replacement: Callable[..., None], also_launch: bool = False) -> Iterator[None]:
    """Within, `replacement` is called instead of the function that launches Triton kernels, or before it."""
    is_launching = False

    def stand_in(launch: Callable[..., Any]) -> Callable[..., None]:
        def launched(*arguments: Any, **constants: Any) -> None:
            nonlocal is_launching
            if is_launching:  # one launching function may call another
                launch(*arguments, **constants)
                return
            replacement(*arguments, **constants)
            is_launching = True
            with without_dispatch_modes():  # the interpreter's own operations are none of the step's
                if also_launch:
                    launch(*arguments, **constants)
            is_launching = False

        return launched

    with replaced_in_triton_modules({"_launch", "launch"}, stand_in):
        yield


@contextlib.contextmanager
def replaced_in_triton_modules(names: set[str], stand_in: Callable[[Any], Any]) -> Iterator[None]:
    """Within, each function of one of these names is `stand_in(function)`, wherever it has been imported to."""
    with contextlib.ExitStack() as patches:
        for module in triton_modules():
            for name in names & vars(module).keys():
                if not isinstance(function := getattr(module, name), ModuleType):
                    patches.enter_context(mock.patch.object(module, name, stand_in(function)))
        yield


def _as_by_cudnn(output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The output of a convolution in channels_last, if its input or its weight is: the meta device's is contiguous."""
    memory_formats = memory_format_of(x), memory_format_of(weight)
    found = [each for each in memory_formats if each in CHANNELS_LAST.values()]
    return output.contiguous(memory_format=found[0]) if found else output
