"""Profile a training step: the host's time beside the device's, and the kernels that take longest.

    python benchmarks/profile_step.py --model densenet_bc_100_12 --batch_size 64 --methods plain,shared

Writes a text file a method to benchmarks/results. On the CPU, which is its own host, it lists operations.
"""

import re
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rows as results
import torch
from methods import choose
from options import run_command
from settings import Setting, as_list, expand
from torch.autograd import DeviceType
from worker import Training, device_name

STEPS = 5
NUM_KERNELS = 10


def profile(
    model: str = "densenet_bc_100_12",
    batch_size: int = 64,
    image_size: int = 0,
    precision: str = "float32",
    methods: Any = "plain,shared",
    device: str = "",
    folder: str = "",
) -> None:
    """Profile steps of each method, and write what took the time to a text file.

    Args:
        model: a zoo model, or densenet_bc_<depth>_<growth rate>.
        batch_size: number of images in a batch.
        image_size: height and width of the images. Default: 32 for models for CIFAR, 224 for ImageNet.
        precision: float32, tf32 (on CUDA), bf16 or fp16 (both with autocast).
        methods: names of methods, joined by commas. Plain is always profiled.
        device: cpu or cuda. Default: cuda if there is a GPU.
        folder: where to write the files. Default: benchmarks/results.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    (setting,) = expand(model, batch_size, image_size, precision, device=device)
    for method in choose(as_list(methods), model, device):
        training = Training(method, setting)
        kernels = training.prepare()["kernels"]
        text = "\n".join([_heading(method, setting, kernels), _times(training), "", _table(training), ""])
        path = (Path(folder) if folder else results.RESULTS) / _file_name(method, setting)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"{text}wrote {path}", flush=True)
        del training


def _heading(method: str, setting: Setting, kernels: str) -> str:
    where = f"{device_name(torch.device(setting.device))}, torch {torch.__version__}, commit {results.commit()}"
    ran = f"{method} ({kernels} kernels)" if kernels else method
    return f"{ran}: {setting.model}, batch {setting.batch_size}, {setting.precision}; {where}"


def _times(training: Training) -> str:
    """The median time of the host's part of a step, until its last launch, and of the whole."""
    host, whole = [], []
    for _ in range(STEPS):
        _synchronize(training)
        start = time.perf_counter()
        training.step()
        host.append(time.perf_counter() - start)
        _synchronize(training)
        whole.append(time.perf_counter() - start)
    milliseconds = [f"{statistics.median(each) * 1000:.2f} ms" for each in (host, whole)]
    return f"a step: {milliseconds[1]}, of which the host takes {milliseconds[0]} until it has launched everything"


def _table(training: Training) -> str:
    """What took longest in a profiled step: kernels on a GPU, operations on the CPU."""
    on_gpu = training.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    with torch.profiler.profile(activities=activities, acc_events=True) as profiled:
        training.step()
        _synchronize(training)
    return "\n".join(longest(profiled.key_averages(), on_gpu))


def longest(events: Iterable[Any], on_gpu: bool) -> list[str]:
    """A line for all events together, and one for each of those that take longest. Their times are in microseconds.

    On a GPU the operations that launched kernels have the kernels' times too, and are left out.
    """
    if on_gpu:
        own = {event: event.self_device_time_total for event in events if event.device_type != DeviceType.CPU}
    else:
        own = {event: event.self_cpu_time_total for event in events}
    total, calls = sum(own.values()), sum(event.count for event in own)
    lines = [f"{calls} {'kernels' if on_gpu else 'operations'} a step, together {total / 1000:.2f} ms:"]
    for event in sorted(own, key=lambda event: -own[event])[:NUM_KERNELS]:
        share = own[event] / total if total else 0.0
        lines.append(f"{own[event] / 1000:9.3f} ms  {share:5.1%}  {event.count:5} ×  {event.key[:90]}")
    return lines


def _synchronize(training: Training) -> None:
    if training.device.type == "cuda":
        torch.cuda.synchronize(training.device)


def _file_name(method: str, setting: Setting) -> str:
    device = "cpu" if setting.device == "cpu" else device_name(torch.device(setting.device))
    device = re.sub(r"\W+", "_", device).lower()
    return f"profile_{device}_{setting.model}_{setting.batch_size}_{setting.precision}_{method}.txt"


if __name__ == "__main__":
    run_command(profile)
