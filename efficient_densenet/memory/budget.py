"""Training within a number of bytes: which bottlenecks are saved rather than recomputed, and how large a batch may be.

A bottleneck of w channels costs w · pixels values until its stage's backward is done, and spares c · w · pixels
multiplications, c being the channels that its layer reads, less the time to write and read it. Bottlenecks are taken in
one order: those of the last block first, which are freed before the backward of the first, where a step holds most, and
in a block first those that spare the most. A budget takes as many as fit, so a larger one takes what a smaller does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from .._checks import check_module, integer
from .._torch_private import memory_key
from ..engine.choose import engine_blocks
from .meta import unwrapped
from .sizes import at_least, format_bytes, parse_bytes
from .step import Loss, MetaModel, OptimizerLike, Precision, Shape, dense_layers

MULTIPLICATIONS_A_NUMBER = 64
"""A processor multiplies about as often in the time in which it writes and reads a number: what takes fewer
multiplications than that is faster to recompute. (Measured on CPUs.)"""


class Recomputed(NamedTuple):
    """A layer whose bottleneck is recomputed: its block's name, its position there, and the multiplications that are
    spared if it is saved."""

    block: str
    position: int
    work: int


@dataclass(frozen=True)
class BudgetPlan:
    """A plan for the layers whose bottlenecks a budget allows to save.

    Attributes:
        budget: in bytes.
        total: the most that training will hold at once, as in `MemoryEstimate`.
        kept: for each block, the positions of the layers whose bottlenecks are saved.
        num_layers: how many layers there are whose bottlenecks it is faster to save.
        recomputed: the multiplications that saving all the rest would spare, less the time that it would take.
    """

    budget: int
    total: int
    kept: dict[str, tuple[int, ...]]
    num_layers: int
    recomputed: int

    def __str__(self) -> str:
        count, size = sum(map(len, self.kept.values())), f"{format_bytes(self.total)} of {format_bytes(self.budget)}"
        if not self.num_layers:
            return f"{size}, with nothing whose saving would spare time"
        if count == self.num_layers:
            return f"{size}, with the bottlenecks of all {count} layers saved that take longer to recompute"
        return (
            f"{size}, with the bottlenecks of {count} of {self.num_layers} layers saved; saving the rest would spare "
            f"{self.recomputed / 1e6:,.0f} million multiplications a step"
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
        budget: bytes, or a text such as "6GiB", for all that `MemoryEstimate.total` has: parameters, gradients, the
            optimizer's state, the batch, the tensors of a step, and what libraries may take.
        input_shape: of a batch; smaller batches need less.
        optimizer: as in `predict`.
        precision: as in `predict`.
        device: as in `predict`.
        loss: as in `predict`.

    A budget in which no step is possible, which is one below `predict(...).total` of a model that saves no bottleneck,
    raises ValueError, and leaves the model as it is.
    """
    size = parse_bytes("budget", budget)
    check_module("set_memory_budget", model)
    traced = MetaModel(model, optimizer=optimizer, precision=precision, device=device, loss=loss)
    plan = Planner(traced, input_shape).plan(size)
    keep(model, plan.kept)
    return plan


def keep(model: nn.Module, kept: dict[str, tuple[int, ...]]) -> None:
    """Let the blocks of `model` save the bottlenecks of the layers at these positions, and no others."""
    for name, block in engine_blocks(unwrapped(model)):
        block.keep_bottlenecks(kept.get(name, ()))


def _positions(layers: Sequence[Recomputed]) -> dict[str, tuple[int, ...]]:
    """The positions of the layers in each block, in order."""
    kept = dict[str, tuple[int, ...]]()
    for each in layers:
        kept[each.block] = tuple(sorted((*kept.get(each.block, ()), each.position)))
    return kept


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
    """The most images of which a training step fits a budget, for the model as it is.

    `image_size` is one number for all sides, or a number for each. The other arguments are those of
    `set_memory_budget`, which takes the budget for a batch of this size. Where not even one image fits, ValueError is
    raised.
    """
    size = parse_bytes("budget", budget)
    check_module("largest_batch", model)
    traced = MetaModel(model, optimizer=optimizer, precision=precision, device=device, loss=loss)
    shape = image_shape(traced, image_size)
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
        keep(traced.model, {})
        self.step = traced.training_step(input_shape)
        self.smallest = traced.total(input_shape, self.step.tensor_peak)
        """The least budget with which a step is possible."""
        by_block = dict[str, list[Recomputed]]()
        for name, i, layer in dense_layers(self.traced.model):  # those that are faster to save, in the order of taking
            values = layer.conv1.out_channels * self.step.pixels[memory_key(layer.conv1.weight)]
            spared = layer.conv1.in_channels - MULTIPLICATIONS_A_NUMBER  # of each value's multiplications
            if layer.conv2 is not None and values and spared > 0:
                by_block.setdefault(name, []).append(Recomputed(name, i, values * spared))
        blocks = (sorted(layers, key=lambda each: each.work, reverse=True) for layers in reversed(by_block.values()))
        self.layers = [layer for layers in blocks for layer in layers]

    def plan(self, budget: int) -> BudgetPlan:
        """The plan of as many layers as fit, by a bisection."""
        if budget < self.smallest:
            (images, *sides), needed = self.input_shape, at_least(self.smallest)
            fitting = batch_that_fits(self.traced, sides, budget, images)
            fewer = f", or at most {fitting} image{'s' if fitting > 1 else ''}" if fitting else ""
            is_full = self.traced.dtype is None and self.traced.own_dtype is torch.float32
            lower = ", or try precision='bf16'" if is_full else ""
            raise ValueError(
                f"found a memory budget of {format_bytes(budget)}, but a step of {images} images of "
                f"{'×'.join(map(str, sides))} needs {needed}: give at least {needed}{fewer}{lower}"
            )
        fits, total, too_many, count = 0, self.smallest, len(self.layers) + 1, len(self.layers)
        while too_many - fits > 1:
            keep(self.traced.model, _positions(self.layers[:count]))
            needed = total_memory_of_step(self.traced, self.input_shape)
            if needed <= budget:
                fits, total = count, needed
            else:
                too_many = count
            count = (fits + too_many) // 2
        keep(self.traced.model, {})
        recomputed = sum(each.work for each in self.layers[fits:])
        return BudgetPlan(budget, total, _positions(self.layers[:fits]), len(self.layers), recomputed)


def batch_that_fits(
    traced: MetaModel, image_shape: Shape, budget: int, at_most: int = 1 << 30, tried: dict[int, int] | None = None
) -> int:
    """The largest batch of which a step fits the budget, 0 if there is none. `tried` gets the bytes of each that was
    tried.

    The memory grows almost linearly from what is held before a step: tried next is where the line through two known
    sizes reaches the budget.
    """
    tried = {} if tried is None else tried
    held = traced.persistent.total + traced.spare(0)
    fits, too_large, guess = 0, at_most + 1, min(2, at_most)
    while too_large - fits > 1:
        tried[guess] = total_memory_of_step(traced, (guess, *image_shape))
        fits, too_large = (guess, too_large) if tried[guess] <= budget else (fits, guess)
        known = {0: held, **tried}
        low, high = (fits, too_large) if too_large in known else sorted(known)[-2:]
        guess = low + (budget - known[low]) * (high - low) // max(known[high] - known[low], 1)
        guess = min(max(guess, fits + 1), too_large - 1)
    return fits


def total_memory_of_step(traced: MetaModel, input_shape: Shape) -> int:
    """The bytes of a training step, as in `MemoryEstimate.total`."""
    count, *shape = input_shape
    try:
        peak = traced.training_step(input_shape).tensor_peak
    except ValueError:
        if count > 1:
            raise
        # A single image may leave a batch norm a single value, with which no step is possible.
        two, three = (traced.training_step((count, *shape)).tensor_peak for count in (2, 3))
        peak = 2 * two - three
    return traced.total(input_shape, peak)


def image_shape(traced: MetaModel, image_size: int | Sequence[int]) -> tuple[int, ...]:
    """The channels and the sides of an input: the channels of the first convolution with which the forward runs."""
    convs = [module for module in traced.model.modules() if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    if not convs:
        raise ValueError("found a model without a convolution: its input's shape is not known")
    shapes = dict[tuple[int, ...], None]()
    for conv in convs:
        dims = len(conv.kernel_size)
        sides: list[Any] = [*image_size] if isinstance(image_size, (list, tuple)) else [image_size] * dims
        if len(sides) == dims and all(map(integer(1).accepts, sides)):
            shapes[(conv.in_channels, *map(int, sides))] = None
    if not shapes:
        dims = len(convs[0].kernel_size)
        raise ValueError(f"image_size is {image_size!r}, but must be a whole number of at least 1, or {dims} of them")
    errors = list[ValueError]()
    for shape in shapes:
        try:
            traced.inference((1, *shape))
        except ValueError as error:
            errors.append(error)
        else:
            return shape
    raise errors[0]
