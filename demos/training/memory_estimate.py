"""The memory of a run's steps, known before the first: what fits is chosen, and what does not fit is refused."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from efficient_densenet.memory.budget import Planner, batch_that_fits, keep, total_memory_of_step
from efficient_densenet.memory.sizes import format_bytes, parse_bytes
from efficient_densenet.memory.step import MetaModel, PersistentMemory
from efficient_densenet.models.densenet import DenseNet

from .distributed import DistributedContext
from .options import RunOptions
from .report import mib

_SHARE_OF_FREE = 0.8
"""The part of a GPU's free memory to take: cuDNN's workspaces and the gaps between tensors need some."""
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class RunMemory:
    """The memory of a run's steps on one device: `traced`, whose persistent memory is that of a process."""

    def __init__(self, model: DenseNet, image_size: int, options: RunOptions, engine: str | None = None) -> None:
        self.traced = MetaModel(model, optimizer="sgd", precision=options.amp)
        self.traced.persistent = _of_a_process(self.traced.persistent)
        engine = engine or options.engine
        cast(DenseNet, self.traced.model).set_engine(True if engine == "best" else engine)
        self.image_shape = model.in_channels, image_size, image_size

    def peak(self, batch_size: int) -> int:
        return total_memory_of_step(self.traced, (batch_size, *self.image_shape))


def _of_a_process(held: PersistentMemory) -> PersistentMemory:
    if dist.is_initialized() and dist.get_world_size() > 1:
        # DistributedDataParallel's buckets have them once more; fully_shard takes no more than that.
        return replace(held, gradients=2 * held.gradients)
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
    images = f"{batch_size} images"
    if not (options.micro_batch_size or options.cuda_graph or is_resumed):
        fitting = batch_that_fits(memory.traced, memory.image_shape, budget, at_most=batch_size)
        if 0 < fitting < batch_size:
            parts = -(-batch_size // fitting)
            size = -(-batch_size // parts)
            images = (
                f"{parts} micro-batches of {size} images, as {images} at once do not fit; batch norms take their "
                f"statistics of {size} images at a time"
            )
            batch_size = size
            options = replace(options, micro_batch_size=batch_size)
    try:
        plan = Planner(memory.traced, (batch_size, *memory.image_shape)).plan(budget)
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
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return round(_SHARE_OF_FREE * free), f"{format_bytes(free)} of the GPU are free"


def describe_expected_memory(model: DenseNet, image_size: int, options: RunOptions, batch_size: int) -> str:
    """The expected peak; an engine or a batch that cannot run here is an error, before anything is written."""
    peak, available = RunMemory(model, image_size, options).peak(batch_size), _memory_of_machine()
    if next(model.parameters()).device.type == "cpu" and peak > available:
        raise MemoryError(
            f"found that a step of {batch_size} images of {image_size}×{image_size} would take {mib(peak)}, but this "
            f"machine has {mib(available)}: {what_to_change(options)}"
        )
    return (
        f"about {mib(peak)} of tensors for {batch_size} images at once on a device (parameters, gradients, momentum "
        "and what a step holds; Python, PyTorch and its kernels come on top)"
    )


def _memory_of_machine() -> int:
    """Bytes of the machine, or of the container if that may use fewer."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append(int(path.read_text()))
    return min(limits)


def what_to_change(options: RunOptions) -> str:
    """What makes a step smaller, of what a run's options leave."""
    engine = "" if options.engine in ("best", "shared") else "--engine best, "
    kept = "--keep_bottleneck False, " if options.keep_bottleneck else ""
    return f"give {engine}{kept}--memory, which chooses micro-batches that fit, or smaller images"
