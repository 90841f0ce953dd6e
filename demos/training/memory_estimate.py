"""The memory of a run's steps, known before the first: what fits is chosen, and what does not fit is refused."""

from dataclasses import replace
from typing import Any, cast

import torch.distributed as dist

from efficient_densenet.memory.budget import Planner, batch_that_fits, keep, total_memory_of_step
from efficient_densenet.memory.sizes import parse_bytes
from efficient_densenet.memory.step import MetaModel
from efficient_densenet.models.densenet import DenseNet

from .distributed import DistributedContext
from .options import RunOptions
from .report import mib


def _traced(model: DenseNet, options: RunOptions) -> MetaModel:
    """The model and its optimizer without memory, whose persistent memory is that of one process of a run."""
    traced = MetaModel(model, optimizer="sgd", precision=options.amp)
    if dist.is_initialized() and dist.get_world_size() > 1:
        # DistributedDataParallel's buckets have the gradients once more; fully_shard takes no more than that.
        traced.persistent = replace(traced.persistent, gradients=2 * traced.persistent.gradients)
    cast(Any, traced.model).set_engine(True if options.engine == "best" else options.engine)
    return traced


def expected_peak(model: DenseNet, image_size: int, options: RunOptions, batch_size: int) -> int:
    """The most bytes of all tensors in a step of so many images at once on a device."""
    return total_memory_of_step(_traced(model, options), (batch_size, model.in_channels, image_size, image_size))


def largest_batch(options: RunOptions, num_images: int, context: DistributedContext) -> int:
    """The most images that one device computes at once."""
    devices = context.world_size * max(context.num_gpus, 1)
    per_device = -(-min(options.batch_size, num_images) // devices)
    return min(per_device, options.micro_batch_size or per_device)


def fit_into_memory(
    model: DenseNet, image_size: int, options: RunOptions, batch_size: int, is_resumed: bool
) -> tuple[RunOptions, str | None]:
    """Let `model` save the bottlenecks for which there is `--memory`.

    Returns the options, with a micro-batch where the batch is too large, and what was chosen in words. A resumed run
    keeps its micro-batches, on which its numbers depend.
    """
    if options.memory is None:
        return options, None
    budget, traced = parse_bytes("memory", options.memory), _traced(model, options)
    image_shape, images = (model.in_channels, image_size, image_size), f"{batch_size} images"
    if not (options.micro_batch_size or options.cuda_graph or is_resumed):
        fitting = batch_that_fits(traced, image_shape, budget, at_most=batch_size)
        if 0 < fitting < batch_size:
            parts = -(-batch_size // fitting)
            size = -(-batch_size // parts)
            images = (
                f"{parts} micro-batches of {size} images, as {images} at once do not fit; batch norms take their "
                f"statistics of {size} images at a time"
            )
            batch_size, options = size, replace(options, micro_batch_size=size)
    try:
        plan = Planner(traced, (batch_size, *image_shape)).plan(budget)
    except ValueError as exc:
        raise MemoryError(str(exc)) from exc
    keep(model, plan.kept)
    return options, f"--memory {options.memory}: {images}; {plan}"


def describe_expected_memory(model: DenseNet, image_size: int, options: RunOptions, batch_size: int) -> str:
    """The expected peak; an engine that cannot run here is an error, before anything is written."""
    peak = expected_peak(model, image_size, options, batch_size)
    return (
        f"about {mib(peak)} of tensors for {batch_size} images at once on a device (parameters, gradients, momentum "
        "and what a step holds; Python, PyTorch and its kernels come on top)"
    )


def what_to_change(options: RunOptions) -> str:
    """What makes a step smaller, of what a run's options leave."""
    engine = "" if options.engine in ("best", "shared") else "--engine best, "
    kept = "--keep_bottleneck False, " if options.keep_bottleneck else ""
    kept += "--cuda_graph False, " if options.cuda_graph else ""
    return f"give {engine}{kept}--memory, which chooses micro-batches that fit, or smaller images"
