"""Measure methods: time and memory of a training step or of inference, relative to plain.

    python benchmarks/run.py --model densenet_bc_100_12 --batch_size 64,256
    python benchmarks/run.py --allocator tcmalloc                      an allocator that keeps its pages, best for plain
    python benchmarks/run.py --precision float32,bf16 --layout channels_last --methods plain,shared
    python benchmarks/run.py --inference                               a forward in eval mode without gradients
    python benchmarks/run.py --sweep depth                             memory only, for the figures
    python benchmarks/run.py --sweep devices                           batches 4, 256, 512 on one device and on two
    python benchmarks/run.py --sweep users --card_gb 8,16              X-rays, volumes, pixels; a GPU as if it had 8 GB
    python benchmarks/run.py --what check                              are the gradients right? beside plain in float64

Each method runs in a fresh process. First its memory is measured: the tensor peak is the maximum of allocated tensor
memory during a step, minus what was allocated before the step; the process peak is the growth of the process's
high-water mark. The seconds of the first step are printed and written too: `torch.compile` compiles in it, with nothing
kept from earlier runs unless --compiler_cache names a directory. Then, in each round, every method takes one timed
step. A ratio of times compares two steps of the same round, so that all methods are affected alike if the machine
becomes faster or slower.
"""

import gc
import signal
import sys
from pathlib import Path
from typing import Any

import rows as results
import torch
import worker
from comparison import OUT_OF_MEMORY, Comparison, Measurement, ask, find_allocator
from methods import ORDINARY, Setting, as_list, choose, expand
from options import run_command

USERS = (
    ("densenet121", "1x512x512", (4, 32)),
    ("densenet121", "1x96x96x96", (2, 16)),
    ("fc_densenet103", "3x352x480", (1, 3)),
    ("fc_densenet56", "1x64x64x64", (1, 3)),
    ("fc_densenet56", "1x32x32x32", (2, 24)),
)
"""Models and images of their users, and batches for a processor and a card."""
SWEEPS: dict[str, dict[str, Any]] = {
    "depth": {"model": [f"densenet_bc_{depth}_12" for depth in (40, 100, 160, 250)], "batch_size": 8},
    "batch": {"batch_size": [8, 64, 128, 256]},
    "activations": {
        "model": [
            "densenet_bc_100_12",
            *(f"densenet_bc_100_12+{name}" for name in ("leaky_relu", "elu", "silu", "gelu", "mish")),
        ],
        "batch_size": 16,
        "methods": ("plain", "shared"),
        "rounds": 5,
    },
    "users": {"methods": ("plain", "shared"), "rounds": 5},
    "devices": {
        "batch_size": [4, 256, 512],
        "devices": [1, 2],
        "methods": ("plain", "official", "checkpoint_function", "checkpoint", "shared"),
        "rounds": 1,
    },
}
"""The defaults of options by sweep. That of devices is the table that the project began with: naive is `plain`."""
SWEEP_METHODS = ("plain", "shared", "shared_keep", "checkpoint")
WHAT = ("time", "check", "plan")
ERROR_OVER_PLAIN = 2.0
"""Largest ratio of a method's error to plain's."""
ROUNDING = {"float32": 1e-4, "tf32": 1e-2, "bf16": 0.1, "fp16": 0.02}
"""Errors that are no sign of a defect: where rounding changes a sign, ReLU's mask is the other one."""


def run(
    model: str | list[str] | None = None,
    batch_size: int | list[int] | None = None,
    image_size: int | str = 0,
    precision: str | list[str] = "float32",
    layout: str | list[str] = "contiguous",
    methods: str | list[str] | None = None,
    rounds: int | None = None,
    device: str = "",
    threads: int = 0,
    devices: int | list[int] | None = None,
    allocator: str = "",
    card_gb: int | list[int] = 0,
    sweep: str = "",
    inference: bool = False,
    what: str = "time",
    compiler_cache: str = "",
    patience: float = 300,
    missing: bool = False,
    folder: str = "",
) -> None:
    """Measure all methods in all combinations of the options, and write a CSV file for each model and batch size.

    Args:
        model: a zoo model, or densenet_bc_<depth>_<growth rate>. Several values of an option are joined by commas.
        batch_size: number of images in a batch.
        image_size: height and width of the images, or channels and sizes such as 1x96x96x96. Default: 32 for models for
            CIFAR, 224 for ImageNet.
        precision: float32, tf32 (on CUDA), bf16 or fp16 (both with autocast).
        layout: contiguous or channels_last.
        methods: names of methods. Default: all but those in channels_last. Plain is always measured, because the
            others are compared with it.
        rounds: number of timed steps. 0 measures only memory and the first step. Default: 9, or 0 for a figure's sweep.
        device: cpu or cuda. Default: cuda if there is a GPU.
        threads: number of CPU threads. Default: PyTorch's.
        devices: number of GPUs, by nn.DataParallel, or of replicas in threads that share the CPU's. Memory is that of
            one device; plain runs on as many. Default: 1.
        allocator: allocator of CPU memory to preload in the workers: tcmalloc, jemalloc or the path of a library.
        card_gb: how much of a GPU's memory PyTorch may reserve, in GB. All is then measured in this process, and the
            process peak is all that was reserved. Default: all there is.
        sweep: depth or batch, for the figures, devices, activations or users. It sets the defaults of what it is about,
            and of methods.
        inference: measure a forward in eval mode without gradients instead of a training step.
        what: time (and memory); check, which fails where the error of a method's gradients, or of its outputs in
            inference, is more than twice plain's; or plan, which only prints what would be measured.
        compiler_cache: a directory in which compilers find what they compiled before. Default: a new one each time.
        patience: timeout of a method's answer, in seconds.
        missing: measure what this commit has not measured yet, and leave rows of other commits out of the files.
        folder: where to write the files. Default: benchmarks/results.
    """
    if sweep and sweep not in SWEEPS:
        raise ValueError(f"unknown sweep {sweep!r}: there are {', '.join(SWEEPS)}")
    if what not in WHAT:
        raise ValueError(f"unknown measurement {what!r}: there are {', '.join(WHAT)}")
    of_any = {"methods": SWEEP_METHODS, "rounds": 0} if sweep else {"methods": ORDINARY, "rounds": 9}
    defaults = {"model": "densenet_bc_100_12", "batch_size": 64, "devices": 1, **of_any, **SWEEPS.get(sweep, {})}
    device = device if what == "plan" else _device(device)
    if sweep == "users":
        named, on_gpu = as_list(model or ""), device.startswith("cuda")
        cases = [
            (name, batch_size or batches[on_gpu], image_size or size)
            for name, size, batches in USERS
            if not named or name in named
        ]
    else:
        cases = [(model or defaults["model"], batch_size or defaults["batch_size"], image_size)]
    shared = precision, layout, device, threads, inference, devices or defaults["devices"], card_gb
    settings = [setting for case in cases for setting in expand(*case, *shared)]
    names = as_list(methods) if methods else list(defaults["methods"])
    rounds = defaults["rounds"] if rounds is None else rounds
    preload, target, too_large = find_allocator(allocator), Path(folder or results.RESULTS), []
    for setting in settings:
        print(f"{setting.model}, batch {setting.batch_size}, {setting.precision}, {setting.layout}, ", end="")
        print(f"{setting.devices} × {setting.device}{f' of {setting.card_gb} GB' if setting.card_gb else ''}")
        if setting.device == "cuda" and setting.devices > torch.cuda.device_count() and what != "plan":
            print(f"  n/a: {setting.devices} GPUs are needed, found {torch.cuda.device_count()}")
            continue
        chosen = choose(names, setting)
        path = target / f"{results.stem(setting, setting.device, sweep)}.csv"
        if what == "plan":
            print(f"  {path.name}: {', '.join(chosen)}")
        elif what == "time" and missing and results.has(path, setting, chosen, rounds):
            print("  measured at this commit")
        elif what == "check":
            too_large += _check(setting, chosen, patience)
        else:
            comparison = Comparison(chosen, rounds)
            try:
                if setting.card_gb:
                    _measure_within_card(setting, comparison)
                else:
                    comparison.run(setting, preload, patience, compiler_cache)
            finally:  # if a time limit ends the run, what has been measured is written too
                plain = comparison.measurements["plain"]
                if preload and plain.allocator == "system":
                    raise ValueError(f"{preload} was preloaded, but the workers do not use it: is it an allocator?")
                path = target / f"{results.stem(setting, plain.device_name, sweep)}.csv"
                _write(setting, comparison.measurements, path, missing)
    if too_large:
        raise ValueError(f"results differ by more than rounding: {', '.join(too_large)}")


def _measure_within_card(setting: Setting, comparison: Comparison) -> None:
    """Measure on a GPU as if it had less memory, in this process: to start one for each method would take longer."""
    card = setting.card_gb * 1e9 / torch.cuda.get_device_properties(setting.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, card))
    for method, measurement in comparison.measurements.items():
        measurement.device_name = worker.device_name(torch.device(setting.device))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            task = worker.Task(method, setting)
            vars(measurement).update(task.prepare())
            measurement.times += [task.time_step()["seconds"] for _ in range(comparison.rounds)]
            measurement.process_peak = torch.cuda.max_memory_reserved()
        except Exception as exc:
            if not worker.is_out_of_memory(exc):
                raise
            measurement.note = OUT_OF_MEMORY
        task = None  # its tensors are freed before the next


def _check(setting: Setting, methods: list[str], timeout: float) -> list[str]:
    """Print the error of each method beside plain's, and return the methods whose error is too large."""
    too_large = []
    for method in methods:
        if method == "plain":
            continue
        answer = ask(method, setting, "check", timeout=timeout)
        error, of_plain = answer["error"], answer["error_of_plain"]
        print(f"  {method}: error {error:.2e}, plain's {of_plain:.2e}, beside plain in {answer['truth']}", flush=True)
        if not error <= ERROR_OVER_PLAIN * of_plain + ROUNDING[setting.precision]:
            too_large.append(f"{method} in {setting.precision}")
    return too_large


def _write(setting: Setting, measurements: dict[str, Measurement], path: Path, missing: bool) -> None:
    for measurement in measurements.values():
        if measurement.tensor_peak is None and not measurement.note:
            measurement.note = f"{results.INTERRUPTED}: the run was ended before"
    rows = results.make(setting, measurements)
    for row in rows:
        print(f"  {_summary(row)}", flush=True)
    results.merge(path, rows, missing)
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
    text += f", step {row['step_s_median']} s ({row['time_over_plain_median']} of plain)"
    return f"{text}, host {row['host_s_median']} s" if row["host_s_median"] else text


def _device(name: str) -> str:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"no CUDA device for --device {name}: run it on a machine with one, or take --device cpu")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` writes
    run_command(run)
