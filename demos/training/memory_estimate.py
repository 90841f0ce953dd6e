"""The memory of a run's steps, known before the first: what fits is chosen, and what does not fit is refused."""

from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from efficient_densenet.memory.budget import Planner, batch_that_fits, keep, total_memory_of_step
from efficient_densenet.memory.sizes import format_bytes, parse_bytes
from efficient_densenet.memory.step import MetaModel, PersistentMemory
from efficient_densenet.models.densenet import DenseNet
from efficient_densenet.models.layers import DenseBlock

from .distributed import DistributedContext
from .machine import total_memory
from .options import RunOptions
from .report import mib
from .sharding import gathered_bytes

_SHARE_OF_FREE = 0.8
"""Of a GPU's free memory: cuDNN's workspaces and the gaps between tensors take some."""


class RunMemory:
    """The memory of a run's steps on one device: `traced`, whose persistent memory is that of a process."""

    def __init__(
        self,
        model: DenseNet,
        image_size: int,
        options: RunOptions,
        engine: str | None = None,
        keep_bottlenecks: bool = True,
    ) -> None:
        self.traced = MetaModel(model, optimizer="sgd", precision=options.amp)
        self.traced.persistent = _of_a_process(self.traced.persistent, model, options)
        engine = engine or options.engine
        cast(DenseNet, self.traced.model).set_engine(True if engine == "best" else engine)
        for block in self.traced.model.modules():
            if isinstance(block, DenseBlock) and not keep_bottlenecks:
                block.keep_bottlenecks(())
        self.image_shape = model.in_channels, image_size, image_size
        self.peaks: dict[int, int] = {}

    def peak(self, batch_size: int) -> int:
        if batch_size not in self.peaks:
            self.peaks[batch_size] = total_memory_of_step(self.traced, (batch_size, *self.image_shape))
        return self.peaks[batch_size]


def _of_a_process(held: PersistentMemory, model: DenseNet, options: RunOptions) -> PersistentMemory:
    if options.parallel == "fsdp":  # a part of parameters, gradients and momentum, and what is gathered at once
        part = -(-(held.total - held.buffers) // dist.get_world_size())
        return PersistentMemory(part + gathered_bytes(model), held.buffers, gradients=0, optimizer_state=0)
    if dist.is_initialized() and dist.get_world_size() > 1:
        return replace(held, gradients=2 * held.gradients)  # DistributedDataParallel's buckets have them once more
    return held


def largest_batch(options: RunOptions, num_images: int, context: DistributedContext) -> int:
    """The most images that one device computes at once."""
    devices = context.world_size * max(context.num_gpus, 1)
    per_device = -(-min(options.batch_size, num_images) // devices)
    return min(per_device, options.micro_batch_size or per_device)


def fit_into_memory(
    model: DenseNet, image_size: int, options: RunOptions, batch_size: int, is_resumed: bool
) -> tuple[RunOptions, str | None]:
    """Let `model` save the bottlenecks for which there is memory.

    Returns the options, with a micro-batch where the batch is too large, and what was chosen in words.

    The memory is what `--memory` says or, on a GPU, what is free. Without either nothing is chosen. A resumed run keeps
    its micro-batches, on which its numbers depend.
    """
    budget, source = _budget(options, next(model.parameters()).device)
    if budget is None:
        return options, None
    memory = RunMemory(model, image_size, options)
    traced, images = memory.traced, f"{batch_size} images"
    if not (options.micro_batch_size or options.cuda_graph or is_resumed):
        fitting = batch_that_fits(traced, memory.image_shape, budget, at_most=batch_size)
        if 0 < fitting < batch_size:
            parts = -(-batch_size // fitting)
            batch_size = -(-batch_size // parts)
            options = replace(options, micro_batch_size=batch_size)
            images = f"{parts} micro-batches of {batch_size} images, as {images} at once do not fit"
    try:
        plan = Planner(traced, (batch_size, *memory.image_shape)).plan(budget)
    except ValueError as exc:
        if options.memory is None:
            return options, None  # the first step will say what is wrong, if it does not fit either
        raise MemoryError(str(exc)) from exc
    keep(model, plan)
    return options, f"{source}: {images}; {plan}"


def _budget(options: RunOptions, device: torch.device) -> tuple[int | None, str]:
    if options.memory is not None:
        return parse_bytes("memory", options.memory), f"--memory {options.memory}"
    if device.type != "cuda" or options.keep_bottleneck or options.parallel == "fsdp":
        return None, ""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)
    return round(_SHARE_OF_FREE * free), f"{format_bytes(free)} of the GPU are free"


def describe_expected_memory(model: DenseNet, image_size: int, options: RunOptions, batch_size: int) -> str:
    """The expected peak; an engine or a batch that cannot run here is an error, before anything is written."""
    peak = RunMemory(model, image_size, options).peak(batch_size)
    if next(model.parameters()).device.type == "cpu" and peak > total_memory():
        found = f"found that a step of {batch_size} images of {image_size}×{image_size} would take about {mib(peak)}"
        change = _change_that_fits(model, image_size, options, total_memory(), batch_size)
        raise MemoryError(f"{found}, but this machine has {mib(total_memory())}; {change}")
    return f"about {mib(peak)} for {batch_size} images at once on a device"


def advice_now(model: DenseNet, image_size: int, options: RunOptions, batch_size: int) -> str:
    """Advice after an out-of-memory error on the GPU of `model`; frees the gradients and the allocator's cache."""
    device = next(model.parameters()).device
    peak = torch.cuda.max_memory_allocated(device)
    model.zero_grad()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    available = free + torch.cuda.memory_reserved(device)
    return out_of_memory_advice(model, image_size, options, peak, available, batch_size)


def out_of_memory_advice(
    model: DenseNet, image_size: int, options: RunOptions, peak: int, available: int, batch_size: int
) -> str:
    """What ran out, and the smallest change that fits: another engine first, then smaller micro-batches."""
    found = (
        f"out of memory in a step of {batch_size} images with engine {options.engine}: tensors had reached {mib(peak)} "
        f"of {mib(available)}"
    )
    return f"{found}; {_change_that_fits(model, image_size, options, available, batch_size)}"


def _change_that_fits(model: DenseNet, image_size: int, options: RunOptions, available: int, batch_size: int) -> str:
    estimates = {options.engine: RunMemory(model, image_size, options, keep_bottlenecks=False)}
    peak = estimates[options.engine].peak(batch_size)
    if options.keep_bottleneck and peak <= available:
        return f"--keep_bottleneck False would fit, with about {mib(peak)}"
    without = "--keep_bottleneck False " if options.keep_bottleneck else ""
    if options.engine != "best":
        estimates["best"] = best = RunMemory(model, image_size, options, "best", keep_bottlenecks=False)
        if best.peak(batch_size) <= available:
            return f"{without}--engine best would fit, with about {mib(best.peak(batch_size))}"
    for engine, estimate in estimates.items():
        sizes = [2**i for i in range(batch_size.bit_length()) if 2**i < batch_size]
        fitting = [size for size in sizes if estimate.peak(size) <= available]
        if fitting:
            engine_option = "" if engine == options.engine else f"--engine {engine} "
            expected = mib(estimate.peak(fitting[-1]))
            return f"{without}{engine_option}--micro_batch_size {fitting[-1]} would fit, with about {expected}"
    single = mib(estimates[options.engine].peak(1))
    return f"even a single image needs about {single}: use a smaller model, smaller images or a larger device"
