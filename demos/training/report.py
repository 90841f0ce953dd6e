"""The expected memory of a step, the progress of an epoch, its peak memory, and the line that it ends with."""

import sys
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from efficient_densenet._extras import need
from efficient_densenet.memory import high_water_mark
from efficient_densenet.memory.budget import total_memory_of_step
from efficient_densenet.memory.step import MetaModel
from efficient_densenet.models.densenet import DenseNet

from .options import RunOptions


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.{1 if num_bytes < 10 * 2**20 else 0}f} MiB"


def describe_expected_memory(model: DenseNet, shape: tuple[int, ...], options: RunOptions) -> str:
    """The expected peak of a step; an engine that cannot run here is an error, before anything is written."""
    traced = MetaModel(model, optimizer="sgd", precision=options.amp)
    if dist.is_initialized() and dist.get_world_size() > 1:
        # DistributedDataParallel's buckets have the gradients once more.
        traced.persistent = replace(traced.persistent, gradients=2 * traced.persistent.gradients)
    cast(Any, traced.model).set_engine(True if options.engine == "best" else options.engine)
    return (
        f"about {mib(total_memory_of_step(traced, shape))} of tensors for {shape[0]} images at once on a device "
        "(parameters, gradients, momentum and what a step holds; Python, PyTorch and its kernels come on top)"
    )


def peak_memory(device: torch.device, reserved: bool = False) -> int:
    """CUDA: the peak bytes of tensors since the last reset; CPU: the peak resident memory of the process.

    With `reserved` what CUDA's allocator has reserved: it does not count what a CUDA graph uses when it is replayed.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) if reserved else torch.cuda.max_memory_allocated(device)
    return high_water_mark(device) or 0


def progress_bar(title: str, num_steps: int, initial_step: int, visible: bool) -> Any:
    """A bar for the steps of an epoch, which is shown on a terminal only."""
    on_terminal = visible and sys.stderr is not None and sys.stderr.isatty()
    tqdm = need("tqdm", extra="demos").tqdm
    return tqdm(total=num_steps, initial=initial_step, desc=title, unit="step", leave=False, disable=not on_terminal)


def describe_epoch(title: str, row: dict[str, Any], whole_process: bool) -> str:
    """What an epoch came to. With `whole_process` its peak memory is not that of tensors alone."""
    validation = ""
    if row["valid_loss"] != "":
        validation = f"validation loss {row['valid_loss']:.3f}, error {row['valid_error']:.2%}; "
    of_what = " of the process (Python, PyTorch and tensors)" if whole_process else ""
    return (
        f"{title}: train loss {row['train_loss']:.3f}, error {row['train_error']:.2%}; {validation}"
        f"{row['seconds']:.1f} s, {row['images_per_second']:,.0f} images/s, "
        f"peak memory{of_what} {row['peak_memory_mib']:,.0f} MiB, lr {row['lr']:.3g}"
    )
