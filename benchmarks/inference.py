"""Time and memory of inference: a forward in eval mode without gradients, by plain modules and by the shared engine.

    python benchmarks/inference.py --threads 2
    python benchmarks/inference.py --model densenet121 --batch_size 16 --methods plain,shared --rounds 5

In each round every method runs once, in one process, so that a ratio compares two runs of the same round. Prints a
Markdown table, and writes a CSV file to benchmarks/results with a row for each model and method.
"""

import contextlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import rows as results
import torch
from checkpointing_costs import interleaved_times
from options import run_command
from settings import LAYOUTS, architecture, as_list, default_image_size
from torch import Tensor
from worker import allocator, device_name

from efficient_densenet import DenseNet
from efficient_densenet.engine import choose
from efficient_densenet.memory import tensor_peak

BATCH_SIZES = {"densenet_bc_100_12": 64, "densenet121": 16}
"""The models that are measured, and their number of images."""

TOLERANCE = {"float32": 1e-3, "bf16": 3e-2}
"""For each precision, how far the outputs of a method may be from plain's, relative to the largest of those."""


class Method(NamedTuple):
    """An engine, the memory format of weights and images, and whether `torch.compile` runs the model."""

    engine: str
    layout: str = "contiguous"
    compiled: bool = False


METHODS = {
    "plain": Method("plain"),
    "plain_channels_last": Method("plain", "channels_last"),
    "compile_plain": Method("plain", compiled=True),
    "compile_plain_channels_last": Method("plain", "channels_last", compiled=True),
    "shared": Method("shared"),
    "shared_channels_last": Method("shared", "channels_last"),
}


def measure(
    model: Any = "densenet_bc_100_12,densenet121",
    batch_size: int = 0,
    image_size: int = 0,
    methods: Any = None,
    rounds: int = 15,
    threads: int = 0,
    device: str = "cpu",
    precision: str = "float32",
) -> None:
    """Measure inference by each method, and write a CSV file.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>, or several of them.
        batch_size: number of images. Default: 64 for densenet_bc_100_12, otherwise 16.
        image_size: height and width of the images. Default: 32 for models for CIFAR, 224 for ImageNet.
        methods: names of methods. Default: all. Plain is always measured, because the others are compared with it.
        rounds: number of timed runs of each method.
        threads: number of CPU threads. Default: PyTorch's.
        device: cpu or cuda.
        precision: float32, or bf16 by autocast, which has a file of its own.
    """
    if precision not in TOLERANCE:
        raise ValueError(f"unknown precision {precision!r}: there are {', '.join(TOLERANCE)}")
    names = as_list(methods) if methods else list(METHODS)
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}: there are {', '.join(METHODS)}")
    chosen = [name for name in METHODS if name in ("plain", *names)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        measured = [
            row
            for each in as_list(model)
            for row in _rows(each, chosen, batch_size, image_size, rounds, device, precision)
        ]
    finally:
        torch.set_num_threads(before)
    print(table(measured))
    suffix = "" if precision == "float32" else f"_{precision}"
    path = results.RESULTS / f"inference_torch{torch.__version__.split('+')[0]}{suffix}.csv"
    results.write(path, measured)


def forward_of(method: Method, model: str, images: Tensor, precision: str = "float32") -> Callable[[], Tensor]:
    """A function that returns the model's output on `images`."""
    torch.manual_seed(0)
    network: Any = DenseNet(**architecture(model), efficient=method.engine).eval()
    network.to(images.device, memory_format=LAYOUTS[method.layout])
    images = images.contiguous(memory_format=LAYOUTS[method.layout])
    network = torch.compile(network, fullgraph=True) if method.compiled else network

    def forward() -> Tensor:
        autocast = torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16")
        with torch.no_grad(), autocast, shared_engine_runs(method.engine == "shared"):
            output = network(images)
        if output.is_cuda:
            torch.cuda.synchronize()
        return output

    return forward


def shared_engine_runs(wanted: bool) -> contextlib.AbstractContextManager:
    """A context in which the shared engine runs whether its kernels are the faster ones or not, if that is wanted."""
    if not wanted:
        return contextlib.nullcontext()
    return mock.patch.object(choose, "_has_faster_forward", return_value=True)


def _rows(
    model: str, methods: list[str], batch_size: int, image_size: int, rounds: int, device: str, precision: str
) -> list[dict[str, Any]]:
    batch_size = batch_size or BATCH_SIZES.get(model, 16)
    image_size = image_size or default_image_size(model)
    images = torch.randn(batch_size, 3, image_size, image_size, device=device)
    forwards = {name: forward_of(METHODS[name], model, images, precision) for name in methods}
    _check_outputs({name: forward() for name, forward in forwards.items()}, TOLERANCE[precision])
    peaks = {name: tensor_peak(forward, images.device) for name, forward in forwards.items()}
    times = interleaved_times(forwards, rounds)
    return [
        {
            "model": model,
            "method": name,
            "batch_size": batch_size,
            "image_size": image_size,
            "ms": round(statistics.median(times[name]) * 1000, 2),
            "time_over_plain": round(_median_ratio(times[name], times["plain"]), 3),
            "tensor_peak_mib": round(peaks[name] / 2**20, 1),
            "rounds": rounds,
            "allocator": allocator(),
            "device": images.device.type,
            "device_name": device_name(images.device),
            "threads": torch.get_num_threads(),
            **results.provenance(),
        }
        for name in methods
    ]


def _check_outputs(outputs: dict[str, Tensor], tolerance: float) -> None:
    expected = outputs["plain"]
    for name, output in outputs.items():
        error = ((output - expected).abs().max() / expected.abs().max()).item()
        if not error < tolerance:
            raise RuntimeError(f"found an error of {error:.1e} in the outputs of {name}, needed less than {tolerance}")


def _median_ratio(times: list[float], plain: list[float]) -> float:
    return statistics.median(seconds / of_plain for seconds, of_plain in zip(times, plain, strict=True))


def table(measured: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| model | batch | method | time | memory |", "|---|---:|---|---:|---:|"]
    for row in measured:
        seconds = f"{float(row['ms']):.0f} ms ({float(row['time_over_plain']):.2f}×)"
        cells = row["model"], row["batch_size"], f"`{row['method']}`", seconds, f"{row['tensor_peak_mib']} MiB"
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(measure)
