"""Training within a number of bytes: which bottlenecks are saved rather than recomputed, and how large a batch may be.

A bottleneck of w channels costs w · pixels values until its stage's backward is done, and spares c · w · pixels
multiplications, c being the channels that its layer reads, less the time to write and read it. Bottlenecks are taken in
one order: next is always the one that spares the most for each byte by which the step's peak grows. A budget takes as
many as fit, so a larger budget takes all that a smaller one does.
"""

import contextlib
import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_module, integer
from .._torch_private import memory_key
from ..engine.choose import engine_blocks
from ..engine.parts import NoPartsError, parts_of
from ..engine.stage.spec import NormConv, decode
from .meta_copy import unwrapped
from .order import MULTIPLICATIONS_A_NUMBER, Recomputed, in_order, kept_layers, merged, whole_blocks, work
from .sizes import at_least, format_bytes, parse_bytes
from .step import Loss, MetaModel, OptimizerLike, Precision, Shape, StepMemory

MARGIN = 0.01
"""The share of a step's peak that a plan leaves free: libraries allocate tensors of their own inside of operations."""
CUDNN_WORKSPACE = 40 << 20
"""What a plan leaves free for cuDNN, which took up to 37 MiB on an H100."""

_CONV_WEIGHT = NormConv._fields.index("conv_weight")


@dataclass(frozen=True)
class BudgetPlan:
    """What a budget allows.

    Attributes:
        budget: in bytes.
        total: the most that tensors will hold at once, with all that training holds between steps.
        kept: for each block, the positions of the layers whose bottlenecks are saved.
        saves_all: the blocks that the shared engine cannot run and that save everything.
        num_layers: how many layers there are whose bottlenecks it is faster to save.
        recomputed: the multiplications that saving all the rest would spare, less the time that it would take.
    """

    budget: int
    total: int
    kept: dict[str, tuple[int, ...]]
    saves_all: tuple[str, ...]
    num_layers: int
    recomputed: int

    def __str__(self) -> str:
        if not self.num_layers and not self.saves_all and not self.recomputed:
            return (
                f"{format_bytes(self.total)} of {format_bytes(self.budget)}, with nothing whose saving would spare time"
            )
        count = sum(map(len, self.kept.values()))
        others = f", {', '.join(self.saves_all)} saved whole" if self.saves_all else ""
        return (
            f"{format_bytes(self.total)} of {format_bytes(self.budget)}, with the bottlenecks of {count} of "
            f"{self.num_layers} layers saved{others}; saving the rest would spare {self.recomputed / 1e9:.1f} "
            "billion multiplications a step"
        )


def set_memory_budget(
    model: nn.Module,
    budget: int | str,
    input_shape: Shape,
    *,
    optimizer: OptimizerLike = None,
    precision: Precision = None,
    device: str | torch.device | None = None,
    loss: Loss | None = None,
) -> BudgetPlan:
    """Let a model of this package, or a converted one, save as many bottlenecks as a budget allows.

    Args:
        model: its shared engine saves the bottlenecks that the plan names, and no others.
        budget: bytes, or a text such as "6GiB", for all tensors of a training step: parameters, gradients, the
            optimizer's state, the batch, and what the step allocates.
        input_shape: of a batch; smaller batches need less.
        optimizer, precision, device, loss: as in `predict`.

    A budget in which no step is possible raises ValueError, and leaves the model as it is. A hundredth of the step's
    peak is left free, and on a GPU what cuDNN may need.
    """
    size = parse_bytes("budget", budget)
    check_module("set_memory_budget", model)
    traced = MetaModel(model, optimizer=optimizer, precision=precision, device=device, loss=loss)
    plan = Planner(traced, input_shape).plan(size)
    keep(model, plan)
    return plan


def keep(model: nn.Module, plan: BudgetPlan) -> None:
    """Let the blocks of `model` save the bottlenecks of a plan."""
    _save(unwrapped(model), plan.kept, plan.saves_all)


def _save(model: nn.Module, kept: dict[str, tuple[int, ...]], saves_all: Collection[str]) -> None:
    for name, block in engine_blocks(model):
        block.keep_bottlenecks(kept.get(name, ()))
        block.saves_all = name in saves_all


def largest_batch(
    model: nn.Module,
    image_size: int | Sequence[int],
    budget: int | str,
    *,
    optimizer: OptimizerLike = None,
    precision: Precision = None,
    device: str | torch.device | None = None,
    loss: Loss | None = None,
) -> int:
    """The most images of which a training step fits a budget, for the model as it is, with nothing left free.

    `image_size` is one number for all sides, or a number for each. The other arguments are those of
    `set_memory_budget`. Where not even one image fits, ValueError is raised.
    """
    size = parse_bytes("budget", budget)
    check_module("largest_batch", model)
    traced = MetaModel(model, optimizer=optimizer, precision=precision, device=device, loss=loss)
    shape = _image_shape(traced.model, image_size)
    found = batch_that_fits(traced, shape, size)
    if found == 0:
        least = total_memory_of_step(traced, (1, *shape))
        raise ValueError(
            f"found a memory budget of {format_bytes(size)}, but a step of one image needs {at_least(least)}: give "
            f"at least that much, or a smaller image or model"
        )
    return found


class Planner:
    """Plans for budgets of one model on inputs of one shape. A model that saves bottlenecks already is planned anew."""

    def __init__(self, traced: MetaModel, input_shape: Shape) -> None:
        self.traced, self.input_shape = traced, tuple(input_shape)
        self._keep([])
        layers, owners, run_by_shared = list[Recomputed](), self._owners(), set[int]()

        def observe(name: str, args: tuple[Any, ...]) -> None:  # keeps no tensor, which would live on
            if name == "stage":
                layers.extend(self._layers(owners, *args))
                run_by_shared.update(memory_key(parameter) for parameter in args[1] if parameter is not None)

        self.step = traced.training_step(input_shape, observe)
        self.held = traced.persistent.total + traced.input_bytes(input_shape)
        self.order = list(in_order(merged([*layers, *self._whole_blocks(run_by_shared)]), self.step))
        """The layers in the order in which they are taken, each with the step's peak after it."""

    @property
    def smallest(self) -> int:
        """The least budget with which a step is possible."""
        return self._with_margin(self.step.tensor_peak)

    def plan(self, budget: int) -> BudgetPlan:
        if budget < self.smallest:
            raise ValueError(self._what_would_fit(budget))
        count = sum(1 for _, peak in self.order if self._with_margin(peak) <= budget)
        while True:
            taken = [each for each, _ in self.order[:count]]
            total = self.held + self._step_with(taken).tensor_peak
            if total <= budget or count == 0:
                break
            count -= 1  # a block that runs twice in a step saves more than its part of the model shows
        num_layers = sum(1 for each, _ in self.order if each.position is not None)
        recomputed = sum(each.work for each, _ in self.order[count:])
        return BudgetPlan(budget, total, kept_layers(taken), whole_blocks(taken), num_layers, recomputed)

    def _with_margin(self, peak: int) -> int:
        return self.held + peak + spare(self.traced, peak)

    def _keep(self, taken: list[Recomputed]) -> None:
        _save(self.traced.model, kept_layers(taken), whole_blocks(taken))

    def _step_with(self, taken: list[Recomputed]) -> StepMemory:
        """A step in which these are saved."""
        self._keep(taken)
        try:
            return self.traced.training_step(self.input_shape)
        finally:
            self._keep([])

    def _whole_blocks(self, run_by_shared: set[int]) -> Iterator[Recomputed]:
        """The blocks that are recomputed since the shared engine cannot run them, and no engine is requested."""
        for name, block in engine_blocks(self.traced.model):
            addresses = set(map(memory_key, block.parameters()))
            if block.engine is not None or not addresses or addresses & run_by_shared:
                continue
            whole = Recomputed(name, None, self.traced.parts[next(block.parameters())], 0, 0)
            saving = self._step_with([whole])
            size = saving.features - self.step.features
            multiplications = work(self.step.trace) - work(saving.trace)
            if size > 0 and multiplications > 0:
                yield whole._replace(bytes=size, work=multiplications)

    def _owners(self) -> dict[int, tuple[str, int, str]]:
        """The block, the layer's position there, and the part of the model, by the address of the layer's weight."""
        owners = {}
        for name, block in engine_blocks(self.traced.model):
            with contextlib.suppress(NoPartsError):  # which another engine runs
                for i, layer in enumerate(parts_of(block).layers):
                    owners[memory_key(layer.conv1.weight)] = name, i, self.traced.parts[layer.conv1.weight]
        return owners

    @staticmethod
    def _layers(
        owners: dict[int, tuple[str, int, str]], x: Tensor, parameters: Sequence[Tensor], *others: Any
    ) -> Iterator[Recomputed]:
        """The layers with bottlenecks of a stage, from the arguments of its operator."""
        spec, pixels = decode(others[-1]), x.numel() // x.shape[1]
        for i, layer in enumerate(spec.layers):
            owner = owners.get(memory_key(parameters[spec.layer_tensors(i)][_CONV_WEIGHT]))
            spared = spec.channels_read(i) - MULTIPLICATIONS_A_NUMBER  # of each of the bottleneck's numbers
            if layer.width and owner is not None and spared > 0:
                block, position, part = owner
                values = layer.width * pixels
                yield Recomputed(block, position, part, values * spec.torch_dtype.itemsize, values * spared)

    def _what_would_fit(self, budget: int) -> str:
        images, *shape = self.input_shape
        needed = at_least(self.smallest)
        found = (
            f"found a memory budget of {format_bytes(budget)}, but a step of {images} images of "
            f"{'×'.join(map(str, shape))} needs {needed}: give at least {needed}"
        )
        fitting = batch_that_fits(self.traced, shape, budget, images, with_spare=True)
        if fitting:
            found += f", or at most {fitting} image{'s' if fitting > 1 else ''}"
        elif images > 1:
            single = total_memory_of_step(self.traced, (1, *shape), with_spare=True)
            found += f", of which one image needs {at_least(single)}"
        if self.traced.dtype is None and torch.float32 in {p.dtype for p in self.traced.parameters}:
            lower = copy.copy(self.traced)
            lower.dtype = torch.bfloat16
            peak = total_memory_of_step(lower, self.input_shape, with_spare=True)
            if peak <= budget:
                found += f", or precision='bf16', which needs {at_least(peak)}"
        return found


def batch_that_fits(
    traced: MetaModel, image_shape: Shape, budget: int, at_most: int = 1 << 30, *, with_spare: bool = False
) -> int:
    """The largest batch of which a step fits the budget, 0 if there is none.

    The memory grows almost linearly: tried next is where the line through two known sizes reaches the budget.
    """
    known = {count: total_memory_of_step(traced, (count, *image_shape), with_spare) for count in (2, 3)}
    fits, too_large = 0, at_most + 1
    while True:
        fits = max([fits, *(count for count, size in known.items() if size <= budget and count <= at_most)])
        too_large = min([too_large, *(count for count, size in known.items() if size > budget)])
        if too_large - fits <= 1:
            return fits
        ends = (fits, too_large) if fits in known and too_large in known else sorted(known)[-2:]
        low, high = ends if too_large > 2 else (2, 3)
        guess = low + (budget - known[low]) * (high - low) // max(known[high] - known[low], 1)
        guess = min(max(guess, fits + 1), too_large - 1)
        known[guess] = total_memory_of_step(traced, (guess, *image_shape), with_spare)


def spare(traced: MetaModel, peak: int) -> int:
    """What a plan leaves free besides a step's peak."""
    return round(MARGIN * peak) + (CUDNN_WORKSPACE if traced.device_type == "cuda" else 0)


def total_memory_of_step(traced: MetaModel, input_shape: Shape, with_spare: bool = False) -> int:
    """The bytes of a training step, and of all that is held before it; `with_spare` of what a plan leaves free too."""
    count, *shape = input_shape
    try:
        peak = traced.training_step(input_shape).tensor_peak
    except ValueError:
        if count > 1:
            raise
        # A single image may leave a batch norm a single value, with which no step is possible.
        two, three = (traced.training_step((count, *shape)).tensor_peak for count in (2, 3))
        peak = 2 * two - three
    held = traced.persistent.total + traced.input_bytes(input_shape)
    return held + peak + (spare(traced, peak) if with_spare else 0)


def _image_shape(model: nn.Module, image_size: int | Sequence[int]) -> tuple[int, ...]:
    """The channels and the sides of an input of the model, by its first convolution."""
    kinds = nn.Conv1d, nn.Conv2d, nn.Conv3d
    conv = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if conv is None:
        raise ValueError("found a model without a convolution: its input's shape is not known")
    dims = len(conv.kernel_size)
    sides: list[Any] = list(image_size) if isinstance(image_size, (list, tuple)) else [image_size] * dims
    if len(sides) != dims or not all(map(integer(1).accepts, sides)):
        raise ValueError(f"image_size is {image_size!r}, but must be a whole number of at least 1, or {dims} of them")
    return conv.in_channels, *map(int, sides)
