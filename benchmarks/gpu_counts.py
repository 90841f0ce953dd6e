"""Count what a training step asks of a GPU, without one: launches, bytes moved, the tensor peak.

    python benchmarks/gpu_counts.py --model densenet_bc_100_12 --batch_size 256 --precision tf32

A step (forward, cross entropy, backward, gradients None before) runs on the meta device. A dispatch mode sees each
operation of ATen, a stand-in for the launcher each Triton launch. The rules are simple ones, for ratios of two steps:

- A view or an allocation costs nothing. Any other operation is one launch, a convolution's backward one for each
  gradient. It reads each input and writes each output once; in training mode a batch norm reads its inputs twice.
- A Triton kernel reads or writes each of its tensors once, of a slice only its own columns; accumulators it does both.
- What several tiles read again, caches, and what cuDNN does within are not counted.
"""

import contextlib
import importlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from methods import LAYOUTS, Setting, architecture, expand
from options import run_command
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from efficient_densenet import DenseNet
from efficient_densenet import kernels as kernel_sets
from efficient_densenet._tensors import meta_stands_for
from efficient_densenet._torch_private import backward_inside_function_modes, without_dispatch_modes
from efficient_densenet.kernels import row_tiles
from efficient_densenet.memory.meta import MetaFunctions
from efficient_densenet.memory.trace import MemoryMode

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
VIEWS = {"_unsafe_view", "_reshape_alias", "lift_fresh"}
"""Views whose schemas do not say so."""
FILLS = {"copy_", "zero_", "fill_", "bernoulli_"}
"""Operations in place that do not read what they replace."""
BATCH_NORMS = {"native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward"}


class Launch(NamedTuple):
    """A launch of a Triton kernel: its name, its grid, and the shapes of its tensors."""

    name: str
    grid: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class StepTrace:
    """The launches and the bytes of a step, and the memory of its tensors, gradients included."""

    launches: list[Launch] = field(default_factory=list)
    num_launches: int = 0
    """All launches, of ATen's operations too."""
    bytes: int = 0
    peak: int = 0


def count(
    model: Any = "densenet_bc_100_12",
    batch_size: Any = 256,
    image_size: int = 0,
    precision: Any = "tf32",
    layout: Any = "contiguous",
) -> None:
    """Print what a training step by plain modules and by the shared engine, with Triton's and with the portable
    kernels, asks of a GPU, as a Markdown table.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>, or several of them.
        batch_size: number of images, or several.
        image_size: height and width of the images. Default: 32 for models for CIFAR, 224 for ImageNet.
        precision: float32, tf32, bf16 or fp16 (by autocast), or several of them.
        layout: contiguous or channels_last, or both.
    """
    print("| step | engine | ATen | Triton | bytes | tensor peak |")
    print("|---|---|---:|---:|---:|---:|")
    for setting in expand(model, batch_size, image_size, precision, layout, device="cuda"):
        plain = trace(setting, "plain")
        for engine in ("plain", "shared", "shared_portable"):
            step = plain if engine == "plain" else trace(setting, engine)
            cells = (
                f"{setting.model}, {setting.batch_size}, {setting.precision}, {setting.layout}",
                f"`{engine}`",
                f"{step.num_launches - len(step.launches):,}",
                f"{len(step.launches):,}",
                f"{step.bytes / 1e9:.2f} GB ({step.bytes / plain.bytes:.3f}×)",
                f"{step.peak / 2**20:,.0f} MiB ({step.peak / plain.peak:.3f}×)",
            )
            print(f"| {' | '.join(cells)} |")


def trace(setting: Setting, engine: str) -> StepTrace:
    """A step of the setting on the meta device, by an engine or by `shared_portable`."""
    memory_format: Any = LAYOUTS[setting.layout]
    with torch.device("meta"):
        network = DenseNet(**architecture(setting.model) | {"efficient": engine.removesuffix("_portable")})
        images = torch.empty(setting.batch_size, 3, setting.image_size, setting.image_size)
    network.to(memory_format=memory_format)
    kernels = portable_kernels if engine == "shared_portable" else triton_kernels
    return trace_step(network, images.contiguous(memory_format=memory_format), setting.precision, kernels)


def trace_step(
    network: nn.Module,
    images: Tensor,
    precision: str = "float32",
    kernels: Callable[[], contextlib.AbstractContextManager] | None = None,
    run_kernels: bool = False,
) -> StepTrace:
    """The forward, the cross entropy and the backward of a step whose gradients are None before it.

    Args:
        network: on the meta device, or where the step really runs.
        images: on the network's device.
        precision: float32, tf32, bf16 or fp16.
        kernels: a context that chooses a set of kernels. Default: `triton_kernels`.
        run_kernels: launch the Triton kernels too, or run them by Triton's interpreter.
    """
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    kind, dtype = images.device.type, AUTOCAST_DTYPES.get(precision)
    mode = CountingMode(kind, [*network.parameters(), *network.buffers(), images, labels])
    functions = MetaFunctions("cuda")

    def stand_in(launch: Callable[..., Any]) -> Callable[..., None]:
        def launched(*arguments: Any, **constants: Any) -> None:
            mode.add_launch(*arguments, **constants)
            if run_kernels:
                with without_dispatch_modes():  # the interpreter's own operations are none of the step's
                    launch(*arguments, **constants)

        return launched

    with (
        _tensor_float_32(precision == "tf32"),
        (kernels or triton_kernels)(),
        _replaced("launch", stand_in),
        meta_stands_for("cuda"),
        functions if kind == "meta" else contextlib.nullcontext(),
        mode,
    ):
        with torch.autocast("cpu" if kind == "meta" else kind, dtype, enabled=dtype is not None):
            loss = F.cross_entropy(network(images), labels)
        functions.conversions.clear()
        mode.start_backward()
        backward_inside_function_modes(loss)
    mode.trace.peak = mode.peak
    return mode.trace


class CountingMode(MemoryMode):
    """Counts every operation on tensors of `device_type`. `held` are the tensors from before."""

    def __init__(self, device_type: str = "meta", held: Iterable[Tensor] = ()) -> None:
        super().__init__("cuda" if device_type == "meta" else device_type, held, {})
        self.counted, self.trace = device_type, StepTrace()

    def has_run(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        name, schema = func.overloadpacket.__name__, func._schema
        aliases = [each.alias_info for each in schema.returns]
        is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        on_device = any(tensor.device.type == self.counted for tensor in tensors_of((args, kwargs, output)))
        if not on_device or is_view or name in ALLOCATIONS | VIEWS:
            return
        self.trace.num_launches += sum(args[-1]) if name == "convolution_backward" else 1
        arguments = [*zip(schema.arguments, args, strict=False)]
        arguments += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        is_training = any(value for each, value in arguments if each.name in ("train", "training"))
        for argument, value in arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            read = not argument.is_out and not (written and name in FILLS)
            reads_twice = name in BATCH_NORMS and is_training and argument.name in ("input", "grad_out", "grad_output")
            times = (2 if reads_twice else read) + written
            self.trace.bytes += times * sum(map(touched_bytes, tensors_of(value)))
        results = output if len(schema.returns) > 1 else [output]
        for returned, value in zip(schema.returns, results, strict=False):
            self.trace.bytes += sum(map(touched_bytes, tensors_of(value))) if returned.alias_info is None else 0

    def add_launch(self, prepared: Any, *tensors: Any) -> None:
        """The stand-in for the function that launches a Triton kernel."""
        function, arguments = prepared.kernel, (*tensors, *prepared.numbers)
        while not inspect.isfunction(function):  # below decorators
            function = function.fn
        named = dict(zip(inspect.signature(function).parameters, arguments, strict=False)) | prepared.constants
        shapes = tuple(tuple(value.shape) for value in named.values() if isinstance(value, torch.Tensor))
        self.trace.launches.append(Launch(function.__name__, prepared.grid, shapes))
        self.trace.num_launches += 1
        self.trace.bytes += launch_bytes(function.__name__, named)


def tensors_of(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def touched_bytes(tensor: Tensor) -> int:
    """The bytes in memory that hold the tensor: an expanded dimension has one copy."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


ACCUMULATORS = {"grad_accum"}
"""Results that a kernel reads too, unless it is launched with OVERWRITE."""
UPDATED = {("finish_backward", "sums")}
ONLY_WITH = {
    ("conv1x1_forward", "stats"): "HAS_STATISTICS",
    ("conv1x1_backward", "output"): "HAS_SUMS",
    ("conv1x1_backward", "out_sums"): "HAS_SUMS",
    ("conv3x3_forward", "stats"): "HAS_STATISTICS",
    ("finish_backward", "grad_weight"): "HAS_GRAD_WEIGHT",
    ("finish_backward", "partial_grad_weight"): "HAS_GRAD_WEIGHT",
    ("finish_backward", "sums"): "HAS_SUMS",
}
"""The constant without which a kernel does not use an argument: any other tensor may stand in its place."""


def launch_bytes(kernel: str, arguments: Mapping[str, Any]) -> int:
    """The bytes that a launch moves; `arguments`, by name, are compile-time constants too."""
    total = 0
    for name, value in arguments.items():
        if isinstance(value, Tensor) and arguments.get(ONLY_WITH.get((kernel, name), ""), True):
            accumulates = name in ACCUMULATORS and not arguments.get("OVERWRITE", False)
            total += value.numel() * value.element_size() * (2 if accumulates or (kernel, name) in UPDATED else 1)
    return total


# The Triton kernels on any device


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
def portable_kernels() -> Iterator[None]:
    """Within, the shared engine runs the portable kernels."""

    def supports_none(values: Tensor) -> bool:  # a mock would keep its arguments, and their memory
        return False

    with (
        mock.patch.multiple(kernel_sets, triton_supports=supports_none, numba_supports=supports_none),
        mock.patch.object(row_tiles, "META_TILES", sys.maxsize),
    ):
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


if __name__ == "__main__":
    run_command(count)
