"""The memory of a model's training steps and forwards, without running them."""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import check_module, integer
from .._tensors import meta_stands_for
from .._torch_private import backward_inside_function_modes
from ..engine.choose import Engine, describe, engine_blocks, no_warnings
from ..engine.parts import LayerParts, NoPartsError, parts_of
from .meta import MetaFunctions, OptimizerLike, copy_to_meta, optimizer_state, unwrapped
from .trace import MemoryMode, tensors_of

logger = logging.getLogger(__name__)
"""Logger with a line for each step that is traced, which takes up to a second."""

MARGIN, ONEDNN_MARGIN = 0.01, 0.1
"""The share of a step's peak that libraries may take inside of operations, in tensors of their own: by the shared
engine and on GPUs, and by plain modules on processors, where oneDNN's memory formats depend on the processor."""
CUDNN_WORKSPACE = 40 << 20
"""Bytes that cuDNN may take: it took up to 37 MiB on an H100."""

_TOO_LARGE = "found a tensor of 2^63 bytes or more: give a smaller batch or smaller images"

Precision = torch.dtype | str | None
Loss = Callable[[Any], Tensor]
Shape = Sequence[int]

PRECISIONS: dict[str, torch.dtype | None] = {
    "float32": None,
    "tf32": None,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
"""Autocast's dtypes, None for no autocast."""


@dataclass(frozen=True)
class PersistentMemory:
    """Bytes that training holds between steps."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.buffers + self.gradients + self.optimizer_state


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one part of the model: what it saves for the backward, and the most that all tensors held while it
    ran."""

    name: str
    saved: int
    peak: int


@dataclass(frozen=True)
class StepMemory:
    """The memory of one training step, above what is held before it, in bytes.

    Attributes:
        tensor_peak: the most that tensors hold at once. The gradients of the parameters existed before.
        features: what the forward has left for the backward.
        stages: the parts of the model, in the order of the forward.
        pixels: as in `MemoryMode`.
    """

    tensor_peak: int
    features: int
    stages: tuple[StageMemory, ...]
    pixels: Counter[int] = field(repr=False, compare=False)

    @property
    def scratch(self) -> int:
        """The bytes that the worst moment holds besides the features."""
        return self.tensor_peak - self.features


class MetaModel:
    """A model's copy on the meta device, whose steps show their memory. The arguments are those of `predict`."""

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerLike = None,
        precision: Precision = None,
        device: str | torch.device | None = None,
        loss: Loss | None = None,
    ) -> None:
        check_module("memory", model)
        first = next(model.parameters(), None)
        if device is None and first is not None and not first.is_meta:
            device = first.device
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device_type, self.dtype = torch.device(device).type, autocast_dtype(precision)
        if self.device_type not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device_type!r}, but memory is known on 'cpu' and 'cuda' only")
        self.loss = default_loss if loss is None else loss
        self.model = copy_to_meta(model)
        self.parameters = [*self.model.parameters()]
        self.own_dtype = next((p.dtype for p in self.parameters if p.is_floating_point()), torch.float32)
        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        state = optimizer_state(unwrapped(model), self.model, optimizer)
        self.persistent = PersistentMemory(
            parameters=_nbytes(self.parameters),
            buffers=_nbytes(self.model.buffers()),
            gradients=_nbytes(parameter.grad for parameter in self.parameters),
            optimizer_state=_nbytes(state),
        )
        self.held = [*self.parameters, *self.model.buffers(), *state]
        self.held += [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.parts = dict(parts_of_model(self.model))

    def input_bytes(self, input_shape: Shape) -> int:
        return self._input(input_shape).nbytes

    def total(self, input_shape: Shape, tensor_peak: int) -> int:
        """The bytes of a step with this peak, of all that is held before it, and of what libraries may take."""
        return self.persistent.total + self.input_bytes(input_shape) + tensor_peak + self.spare(tensor_peak)

    def spare(self, tensor_peak: int) -> int:
        """The bytes that libraries may take besides tensors."""
        if self.device_type == "cuda":
            return round(MARGIN * tensor_peak) + CUDNN_WORKSPACE
        is_shared = engine_of(self.model) in (describe(None), Engine.SHARED)
        return round((MARGIN if is_shared else ONEDNN_MARGIN) * tensor_peak)

    def training_step(self, input_shape: Shape) -> StepMemory:
        """The forward, the loss and the backward of a step."""

        def step(x: Tensor, functions: MetaFunctions, mode: MemoryMode) -> None:
            loss = self.loss(self.model(x))
            functions.conversions.clear()
            if not loss.requires_grad:
                raise ValueError("found no parameter that requires a gradient: there is no training step")
            mode.start_backward()
            with torch.autocast("cpu", enabled=False):
                backward_inside_function_modes(loss)

        mode = self._run(step, "training step", input_shape)
        stages = tuple(StageMemory(name, saved, mode.peaks[name]) for name, saved in mode.saved_by_part.items())
        return StepMemory(mode.peak, mode.saved, stages, mode.pixels)

    def inference(self, input_shape: Shape) -> int:
        """The tensor peak of a forward in evaluation mode without gradients."""

        def forward(x: Tensor, functions: MetaFunctions, mode: MemoryMode) -> None:
            training = [module for module in self.model.modules() if module.training]
            try:
                self.model.eval()
                with torch.no_grad():
                    self.model(x)
            finally:
                for module in training:
                    module.training = True

        return self._run(forward, "inference", input_shape).peak

    def _run(self, function: Callable[..., None], name: str, input_shape: Shape) -> MemoryMode:
        """The mode that has seen the operations of `function`.

        They run in a thread of their own, in which the caller's contexts (autocast, no_grad, hooks of saved tensors, a
        checkpoint's recomputation) do nothing.
        """
        x, functions = self._input(input_shape), MetaFunctions(self.device_type)
        logger.info("tracing: %s on %s, engine %s", name, "×".join(map(str, x.shape)), engine_of(self.model))
        mode = MemoryMode(self.device_type, [*self.held, x], self.parts)

        def traced() -> None:
            autocast = torch.autocast("cpu", self.dtype, enabled=self.dtype is not None)
            with meta_stands_for(self.device_type), no_warnings(), functions, mode, autocast:
                function(x, functions, mode)

        try:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(traced).result()
        except (RuntimeError, NotImplementedError) as error:
            if "overflow" in str(error).lower():
                raise ValueError(_TOO_LARGE) from error
            shape = "×".join(map(str, x.shape))
            raise ValueError(
                f"found a model that does not run on sizes alone, here {shape} ({error}), so the memory of a step is "
                "not known: give sizes that it takes"
            ) from error
        return mode

    @torch.inference_mode(False)
    def _input(self, input_shape: Shape) -> Tensor:
        if isinstance(input_shape, Tensor):
            raise TypeError(f"input_shape is a tensor, but must be its shape: {tuple(input_shape.shape)}")
        sizes = [*input_shape] if isinstance(input_shape, Sequence) else []
        if len(sizes) < 2 or not all(integer(1).accepts(size) for size in sizes):
            raise ValueError(f"input_shape is {input_shape!r}, but must be whole numbers such as (64, 3, 224, 224)")
        if math.prod(sizes) * self.own_dtype.itemsize >= 1 << 63:
            raise ValueError(_TOO_LARGE)
        return torch.empty([int(size) for size in sizes], dtype=self.own_dtype, device="meta")


def engine_of(model: nn.Module) -> str:
    """The name of the engine of the first dense block, or "none"."""
    blocks = engine_blocks(model)
    return describe(blocks[0][1].engine) if blocks else "none"


def dense_layers(model: nn.Module) -> Iterator[tuple[str, int, LayerParts]]:
    """The layers that the shared engine can read, with their blocks' names and their positions there."""
    for name, block in engine_blocks(model):
        with contextlib.suppress(NoPartsError):
            for i, layer in enumerate(parts_of(block).layers):
                yield name, i, layer


def default_loss(output: Any) -> Tensor:
    """The cross entropy of an output (N, classes, ...), the sum of any other output."""
    if isinstance(output, Tensor) and output.dim() > 1:
        shape = output.shape[0], *output.shape[2:]
        return F.cross_entropy(output, torch.zeros(shape, dtype=torch.long, device=output.device))
    values = output.values() if isinstance(output, dict) else [output]
    total = sum(tensor.float().sum() for tensor in tensors_of([*values]) if tensor.is_floating_point())
    if not isinstance(total, Tensor):
        raise TypeError(f"found an output of {type(output).__name__}, which has no tensors: give loss=...")
    return total


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    if precision is None or precision is torch.float32:
        return None
    if isinstance(precision, torch.dtype) and precision in PRECISIONS.values():
        return precision
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, but must be one of {', '.join(PRECISIONS)}, or a dtype")
    return PRECISIONS[str(precision)]


def parts_of_model(model: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Each parameter, and the name of its part of the model.

    A part is a dense block and the modules after it, up to the next one, or the modules before the first; elsewhere it
    is a module.
    """
    blocks = {name for name, _ in engine_blocks(model)}
    parents = {_parent(name) for name in blocks}
    parts, owners = list[list[str]](), list[tuple[Tensor, list[str]]]()
    for name, parameter in model.named_parameters():
        path = name.split(".")
        prefixes = [".".join(path[:i]) for i in range(1, len(path))]
        beside_blocks = next((each for each in prefixes if _parent(each) in parents), None)
        module = beside_blocks or ".".join(path[:-1][:2]) or name
        if not parts or module not in parts[-1]:
            continues = beside_blocks and module not in blocks and parts and _parent(parts[-1][0]) == _parent(module)
            parts[-1].append(module) if continues else parts.append([module])
        owners.append((parameter, parts[-1]))
    for parameter, (first, *others) in owners:
        yield parameter, " + ".join([first, *(each.rpartition(".")[2] for each in others)])


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _nbytes(tensors: Any) -> int:
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors if each is not None}
    return sum(storage.nbytes() for storage in storages.values())
