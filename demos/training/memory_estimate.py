"""The expected memory of a training step, extrapolated from two small ones, and advice when memory runs out."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from efficient_densenet.memory import tensor_peak
from efficient_densenet.models.densenet import DenseNet
from efficient_densenet.models.layers import DenseLayer

from .distributed import DistributedContext
from .machine import check_memory, total_memory
from .options import AMP_DTYPES, RunOptions
from .report import mib
from .sharding import gathered_bytes

_TRIAL_BATCH = 16
_TRIAL_SIZE = 128
"""Height and width of images that take little memory: larger ones are tried in no larger a batch than the run's."""
_COPIES_OF_PARAMETERS = 3  # the parameter, its gradient and its momentum; of a frozen one, itself


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of a training step as a linear function of the batch size.

    `persistent` are parameters, gradients, momentum and buffers (where they are sharded, a process's part, and what it
    gathers at once); `fixed` and `per_image` describe the rest.
    """

    persistent: int
    fixed: float
    per_image: float

    def peak(self, batch_size: int) -> int:
        return round(self.persistent + self.fixed + self.per_image * batch_size)


def estimate_memory(
    model: DenseNet, image_size: int, options: RunOptions, engine: str, large: int = _TRIAL_BATCH
) -> MemoryEstimate:
    """Measure two small steps of a copy of `model`, on its device, by `engine`: of `large` images, and half of them."""
    copies = {True: _COPIES_OF_PARAMETERS, False: 1}
    persistent = sum(copies[p.requires_grad] * p.numel() * p.element_size() for p in model.parameters())
    if options.parallel == "fsdp":
        persistent = -(-persistent // dist.get_world_size()) + gathered_bytes(model)
    persistent += sum(b.numel() * b.element_size() for b in model.buffers())
    trial = copy.deepcopy(model).set_engine(True if engine == "best" else engine)
    small = large // 2
    small_peak, large_peak = (_step_peak(trial, batch_size, image_size, options) for batch_size in (small, large))
    per_image = max(large_peak - small_peak, 0) / (large - small)
    return MemoryEstimate(persistent, max(small_peak - small * per_image, 0), per_image)


def _step_peak(model: DenseNet, batch_size: int, image_size: int, options: RunOptions) -> int:
    parameter = next(model.parameters())
    shape = batch_size, model.in_channels, image_size, image_size
    images = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    labels = torch.zeros(batch_size, dtype=torch.long, device=parameter.device)
    amp_dtype = None if options.amp is None else AMP_DTYPES[options.amp]

    def step() -> None:
        with torch.autocast(parameter.device.type, amp_dtype, enabled=amp_dtype is not None):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()

    step()  # allocates the gradients, which are counted with the parameters
    return tensor_peak(step, parameter.device)


def largest_batch(options: RunOptions, num_images: int, context: DistributedContext) -> int:
    """The most images that one device computes at once."""
    devices = context.world_size * max(context.num_gpus, 1)
    per_device = -(-min(options.batch_size, num_images) // devices)
    return min(per_device, options.micro_batch_size or per_device)


def describe_expected_memory(model: DenseNet, image_size: int, options: RunOptions, batch_size: int) -> str:
    """The expected peak; an engine or a batch that cannot run here is an error, before anything is written."""
    try:
        estimate = _estimate_in_steps(model, image_size, options, batch_size)
    except OSError as exc:  # the profiler writes a temporary file
        return f"not measured ({exc.strerror})"
    except torch.OutOfMemoryError as exc:
        device = next(model.parameters()).device
        raise MemoryError(f"out of memory on {device} before the first step: use a smaller model") from exc
    except RuntimeError as exc:
        raise ValueError(str(exc)) from exc
    if _on_processor(model):
        _check_fits(model, image_size, options, estimate, batch_size)
    return f"about {mib(estimate.peak(batch_size))} for {batch_size} images at once on a device"


def _on_processor(model: DenseNet) -> bool:
    return next(model.parameters()).device.type == "cpu"


def _estimate_in_steps(model: DenseNet, image_size: int, options: RunOptions, batch_size: int) -> MemoryEstimate:
    """For large images on a processor, first whether small ones say that a trial would take more than there is."""
    if image_size <= _TRIAL_SIZE:
        return estimate_memory(model, image_size, options, options.engine)
    large = min(_TRIAL_BATCH, max(batch_size, 2))
    if _on_processor(model):
        per_image = estimate_memory(model, _TRIAL_SIZE, options, options.engine).per_image
        num_bytes = per_image * batch_size * (image_size / _TRIAL_SIZE) ** 2
        what = f"a step of {batch_size} images of {image_size}×{image_size}"
        check_memory(num_bytes, what, "give a smaller --image_size, --batch_size or --micro_batch_size")
    return estimate_memory(model, image_size, options, options.engine, large)


def _check_fits(
    model: DenseNet, image_size: int, options: RunOptions, estimate: MemoryEstimate, batch_size: int
) -> None:
    peak, available = estimate.peak(batch_size), total_memory()
    if peak > available:
        found = f"found that a step of {batch_size} images would take about {mib(peak)}, but this machine has"
        change = _change_that_fits(model, image_size, options, available, batch_size)
        raise MemoryError(f"{found} {mib(available)}; {change}")


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
    model = _without_kept_bottlenecks(model)
    estimates = {options.engine: estimate_memory(model, image_size, options, options.engine)}
    peak = estimates[options.engine].peak(batch_size)
    if options.keep_bottleneck and peak <= available:
        return f"--keep_bottleneck False would fit, with about {mib(peak)}"
    without = "--keep_bottleneck False " if options.keep_bottleneck else ""
    if options.engine != "best":
        estimates["best"] = best = estimate_memory(model, image_size, options, "best")
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
    return f"even a single image needs about {single}: use a smaller model or a larger device"


def _without_kept_bottlenecks(model: DenseNet) -> DenseNet:
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, DenseLayer):
            layer.keep_bottleneck = False
    return model
