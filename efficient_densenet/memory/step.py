"""The memory of a model's training steps and forwards, without running them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import check_module, integer
from .._tensors import meta_stands_for
from .._torch_private import backward_inside_function_modes
from ..engine.choose import no_warnings
from ..engine.parts import is_engine_block
from .meta_activations import MetaActivations
from .meta_autocast import MetaAutocast, autocast_on_meta
from .meta_copy import copy_to_meta, unwrapped
from .optimizer_state import OptimizerLike, optimizer_state
from .trace import MemoryMode, MemoryTrace, Observer, tensors_of

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
        trace: every moment.
    """

    tensor_peak: int
    features: int
    stages: tuple[StageMemory, ...]
    trace: MemoryTrace = field(repr=False, compare=False)

    @property
    def scratch(self) -> int:
        """What the worst moment holds besides the features."""
        return self.tensor_peak - self.features


class MetaModel:
    """A model's copy on the meta device, whose steps show their memory. What PyTorch's operations allocate inside
    themselves is known for those of DenseNets; for other networks it is less exact.

    Args:
        model: any module; it is not changed, and need not have data.
        optimizer: one that trains `model`, or a class or function that makes one of parameters, or "sgd" (with
            momentum), "adam", "adamw" or "rmsprop"; None for no optimizer.
        precision: autocast's dtype, or its name; None for no autocast.
        device: "cpu" or "cuda", on which the steps would run. Default: the model's device or, for a model on the meta
            device, a GPU if there is one.
        loss: a function of the model's output. Default: the cross entropy of an output (N, classes, ...), the sum of
            any other output.
    """

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
        self.device_type, self.dtype = _device_type(model, device), autocast_dtype(precision)
        self.loss = default_loss if loss is None else loss
        self.model = copy_to_meta(model)
        self.parameters = [*self.model.parameters()]
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
        self.parts = dict(_parts(self.model))

    def input_bytes(self, input_shape: Shape) -> int:
        return self._input(input_shape).nbytes

    def training_step(self, input_shape: Shape, observe: Observer | None = None) -> StepMemory:
        """The forward, the loss and the backward of a step.

        They run in a thread of their own, in which the caller's contexts (autocast, no_grad, hooks of saved tensors, a
        checkpoint's recomputation) do nothing.
        """
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._training_step, self._input(input_shape), observe).result()

    def _training_step(self, x: Tensor, observe: Observer | None) -> StepMemory:
        autocast, mode = self._modes(x, observe)
        with _traced(self.device_type, autocast, mode):
            with autocast_on_meta(self.device_type, self.dtype):
                loss = self.loss(self.model(x))
            autocast.conversions.clear()
            if not loss.requires_grad:
                raise ValueError("found no parameter that requires a gradient: there is no training step")
            mode.start_backward()
            backward_inside_function_modes(loss)
        return _step_memory(mode)

    def inference(self, input_shape: Shape) -> int:
        """The tensor peak of a forward in evaluation mode without gradients."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._inference, self._input(input_shape)).result()

    def _inference(self, x: Tensor) -> int:
        training = [module for module in self.model.modules() if module.training]
        autocast, mode = self._modes(x, None)
        try:
            self.model.eval()
            with (
                _traced(self.device_type, autocast, mode),
                torch.no_grad(),
                autocast_on_meta(self.device_type, self.dtype),
            ):
                self.model(x)
        finally:
            for module in training:
                module.training = True
        return mode.trace.peak

    def _modes(self, x: Tensor, observe: Observer | None) -> tuple[MetaAutocast, MemoryMode]:
        return MetaAutocast(self.device_type), MemoryMode(self.device_type, [*self.held, x], self.parts, observe)

    @torch.inference_mode(False)
    def _input(self, input_shape: Shape) -> Tensor:
        sizes = [*input_shape] if isinstance(input_shape, Sequence) else []
        if len(sizes) < 2 or not all(integer(1).accepts(size) for size in sizes):
            raise ValueError(f"input_shape is {input_shape!r}, but must be whole numbers such as (64, 3, 224, 224)")
        floating = (p.dtype for p in self.parameters if p.is_floating_point())
        return torch.empty([int(size) for size in sizes], dtype=next(floating, torch.float32), device="meta")


@contextlib.contextmanager
def _traced(device_type: str, autocast: MetaAutocast, mode: MemoryMode) -> Iterator[None]:
    """A model on the meta device runs here, traced by `mode`."""
    try:
        with meta_stands_for(device_type), no_warnings(), autocast, MetaActivations(), mode:
            yield
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{error}; so the memory of a step is not known") from error


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


def _device_type(model: nn.Module, device: str | torch.device | None) -> str:
    first = next(model.parameters(), None)
    if device is not None:
        found = torch.device(device).type
    elif first is None or first.is_meta:
        found = "cuda" if torch.cuda.is_available() else "cpu"
    else:
        found = first.device.type
    if found not in ("cpu", "cuda"):
        raise ValueError(f"device is {found!r}, but memory is known on 'cpu' and 'cuda' only")
    return found


def _parts(model: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Each parameter, and the name of its part of the model.

    A part is a dense block and the modules from there to the next one, or the modules before the first; elsewhere it is
    a module.
    """
    names = dict[str, str]()
    for parent_name, parent in model.named_modules():
        trained = [
            (name, child) for name, child in parent.named_children() if next(child.parameters(), None) is not None
        ]
        children = [(name, is_engine_block(child)) for name, child in trained]
        if any(is_block for _, is_block in children) and not any(each in names for each in _prefixes(parent_name)):
            prefix = f"{parent_name}." if parent_name else ""
            for group in _groups(children):
                names |= {prefix + name: prefix + " + ".join(group) for name in group}
    for name, parameter in model.named_parameters():
        found = next((names[each] for each in _prefixes(name) if each in names), None)
        yield parameter, found or ".".join(name.split(".")[:-1][:2]) or name


def _prefixes(name: str) -> Iterator[str]:
    """The names of the modules in which a module or a parameter is, and its own."""
    keys = name.split(".")
    return (".".join(keys[: i + 1]) for i in range(len(keys)))


def _groups(children: Sequence[tuple[str, bool]]) -> Iterator[list[str]]:
    """The names of children in groups, each of which but the first starts with a block."""
    starts = [0, *(i for i, (_, is_block) in enumerate(children) if is_block and i > 0), len(children)]
    return ([name for name, _ in children[start:stop]] for start, stop in pairwise(starts))


def _step_memory(mode: MemoryMode) -> StepMemory:
    trace, peaks = mode.trace, dict[str, int]()
    for moment in trace.moments:
        peaks[moment.part] = max(moment.bytes, peaks.get(moment.part, 0))
    stages = tuple(StageMemory(name, saved, peaks.get(name, 0)) for name, saved in mode.saved_by_part.items())
    return StepMemory(trace.peak, trace.saved, stages, trace)


def _nbytes(tensors: Any) -> int:
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors if each is not None}
    return sum(storage.nbytes() for storage in storages.values())
