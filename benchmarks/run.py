"""Measure memory and time of a training step with each method, relative to plain.

    python benchmarks/run.py --model densenet_bc_100_12 --batch_size 64,256
    python benchmarks/run.py --allocator tcmalloc                      an allocator that keeps its pages, best for plain
    python benchmarks/run.py --precision float32,bf16 --layout channels_last --methods plain,shared
    python benchmarks/run.py --sweep depth                             memory only, for the figures

Each method runs in a fresh process. First its memory is measured: the tensor peak is the maximum of allocated tensor
memory during a step, minus what was allocated before the step; the process peak is the growth of the process's
high-water mark. The seconds of the first step are printed and written too: `torch.compile` compiles in it, with nothing
kept from earlier runs. Then, in each round, every method takes one timed step. A ratio of times compares two steps of
the same round, so that all methods are affected alike if the machine becomes faster or slower.
"""

import signal
import sys
from pathlib import Path

import allocator as allocators
import rows as results
import torch
from comparison import Comparison, Measurement
from methods import METHODS, choose
from options import run_command
from settings import Setting, as_list, expand

SWEEPS = {
    "depth": {
        "model": [f"densenet_bc_{depth}_12" for depth in (40, 70, 100, 130, 160, 190, 220, 250)],
        "batch_size": 8,
    },
    "batch": {"batch_size": [8, 16, 32, 64, 128, 256]},
}
SWEEP_METHODS = ("plain", "shared", "shared_keep", "checkpoint")


def run(
    model: str | list[str] | None = None,
    batch_size: int | list[int] | None = None,
    image_size: int = 0,
    precision: str | list[str] = "float32",
    layout: str | list[str] = "contiguous",
    methods: str | list[str] | None = None,
    rounds: int | None = None,
    device: str = "",
    threads: int = 0,
    allocator: str = "",
    sweep: str = "",
    patience: float = 300,
    folder: str = "",
) -> None:
    """Measure all methods in all combinations of the options, and write a CSV file for each model and batch size.

    Args:
        model: a zoo model, or densenet_bc_<depth>_<growth rate>. Several values of an option are joined by commas.
        batch_size: number of images in a batch.
        image_size: height and width of the images. Default: 32 for models for CIFAR, 224 for ImageNet.
        precision: float32, tf32 (on CUDA), bf16 or fp16 (both with autocast).
        layout: contiguous or channels_last.
        methods: names of methods. Default: all. Plain is always measured, because the others are compared with it.
        rounds: number of timed steps. 0 measures only memory and the first step. Default: 9, or 0 for a sweep.
        device: cpu or cuda. Default: cuda if there is a GPU.
        threads: number of CPU threads. Default: PyTorch's.
        allocator: allocator of CPU memory to preload in the workers: tcmalloc, jemalloc or the path of a library.
        sweep: depth or batch, for the figures. It sets the default models or batch sizes, and methods.
        patience: timeout of a method's answer, in seconds.
        folder: where to write the files. Default: benchmarks/results.
    """
    if sweep and sweep not in SWEEPS:
        raise ValueError(f"unknown sweep {sweep!r}: there are {', '.join(SWEEPS)}")
    defaults = {"model": "densenet_bc_100_12", "batch_size": 64} | SWEEPS.get(sweep, {})
    device = _device(device)
    settings = expand(
        defaults["model"] if model is None else model,
        defaults["batch_size"] if batch_size is None else batch_size,
        *(image_size, precision, layout, device, threads),
    )
    names = as_list(methods) if methods else list(SWEEP_METHODS if sweep else METHODS)
    rounds = (0 if sweep else 9) if rounds is None else rounds
    preload = allocators.find(allocator)
    for setting in settings:
        _measure(setting, names, rounds, preload, patience, sweep, Path(folder) if folder else results.RESULTS)


def _measure(
    setting: Setting, names: list[str], rounds: int, preload: str, timeout: float, sweep: str, folder: Path
) -> None:
    print(f"{setting.model}, batch {setting.batch_size}, {setting.precision}, {setting.layout}, {setting.device}")
    comparison = Comparison(choose(names, setting.model, setting.device), rounds)
    try:
        comparison.run(setting, preload, timeout)
    finally:  # if a time limit ends the run, what has been measured is written too
        measurements = comparison.measurements
        plain = measurements["plain"]
        if preload and plain.allocator == "system":
            raise ValueError(f"{preload} was preloaded, but the workers do not use it: is it an allocator's library?")
        _write(setting, measurements, folder / results.file_name(setting, plain.device_name, sweep))


def _write(setting: Setting, measurements: dict[str, Measurement], path: Path) -> None:
    for measurement in measurements.values():
        if measurement.tensor_peak is None and not measurement.note:
            measurement.note = "not measured: the run was ended before"
    rows = results.make(setting, measurements)
    for row in rows:
        print(f"  {_summary(row)}", flush=True)
    results.merge(path, rows)
    print(f"  wrote {path}", flush=True)


def _summary(row: results.Row) -> str:
    if row["note"]:
        return f"{row['method']}: {row['note']}"
    text = f"{row['method']}: tensors {row['tensor_peak_mib']} MiB ({row['tensor_peak_over_plain']} of plain), "
    text += f"process {row['process_peak_mib']} MiB, first step {row['first_step_s']} s"
    if row["kernels"]:
        text += f", {row['kernels']} kernels"
    if row["rounds"] == "0":
        return text
    return f"{text}, step {row['step_s_median']} s ({row['time_over_plain_median']} of plain)"


def _device(name: str) -> str:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"no CUDA device for --device {name}: run it on a machine with one, or take --device cpu")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` writes
    run_command(run)
