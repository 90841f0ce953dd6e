"""What a training step holds and takes with each method, as ratios to plain in the same round.

    python benchmarks/run.py --model densenet_bc_100_12 --batch_size 64,256
    python benchmarks/run.py --allocator tcmalloc                      with pages kept, where plain is at its best
    python benchmarks/run.py --precision float32,bf16 --layout channels_last --methods plain,shared
    python benchmarks/run.py --sweep depth                             memory only, for the figures

Every method runs in a fresh process. They take turns, a step each, so that a drift of the machine's speed meets them
alike. Memory is measured before the rounds; DESIGN: the tensor peak is the most that tensors held during a step above
what they held before it, the process peak the growth of the fresh process's high-water mark.
"""

import signal
import sys
from pathlib import Path

import allocator as allocators
import rows as results
import torch
from methods import METHODS, choose
from options import start
from settings import Setting, expand, many
from turns import Comparison, Measured

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
    """Measure every method in every combination of the settings, and write a CSV file for each model and batch size.

    Args:
        model: a zoo model, or densenet_bc_<depth>_<growth rate>; like the others, one or several joined by commas.
        batch_size: pictures in a batch.
        image_size: their height and width; 32 for CIFAR's models and 224 for ImageNet's unless given.
        precision: float32, tf32 (on CUDA), bf16 or fp16 (both by autocast).
        layout: contiguous or channels_last.
        methods: all of them unless given; plain is always there, since the others are compared with it.
        rounds: steps that are timed; 0 measures memory only, as sweeps do unless it is given.
        device: the first GPU where there is one, otherwise the CPU.
        threads: of the CPU; PyTorch's own number unless given.
        allocator: of the CPU's memory: tcmalloc, jemalloc or a library's path, preloaded in the workers.
        sweep: depth or batch, for the figures: fills in models or batch sizes, and methods.
        patience: seconds after which a method that has not answered is given up.
        folder: where the files go; benchmarks/results unless given.
    """
    if sweep and sweep not in SWEEPS:
        raise ValueError(f"unknown sweep {sweep!r}: there are {', '.join(SWEEPS)}")
    usual = {"model": "densenet_bc_100_12", "batch_size": 64} | SWEEPS.get(sweep, {})
    device = _device(device)
    settings = expand(
        usual["model"] if model is None else model,
        usual["batch_size"] if batch_size is None else batch_size,
        *(image_size, precision, layout, device, threads),
    )
    names = many(methods) if methods else list(SWEEP_METHODS if sweep else METHODS)
    rounds = (0 if sweep else 9) if rounds is None else rounds
    preload = allocators.find(allocator)
    for setting in settings:
        _measure(setting, names, rounds, preload, patience, sweep, Path(folder) if folder else results.RESULTS)


def _measure(
    setting: Setting, names: list[str], rounds: int, preload: str, patience: float, sweep: str, folder: Path
) -> None:
    print(f"{setting.model}, batch {setting.batch_size}, {setting.precision}, {setting.layout}, {setting.device}")
    comparison = Comparison(choose(names, setting.model), rounds)
    try:
        comparison.run(setting, preload, patience)
    finally:  # what is known is written too when a limit of time ends the run
        measured = comparison.measured
        if preload and measured["plain"].allocator == "system":
            raise ValueError(f"{preload} was to be preloaded but is not in the workers: is it an allocator's library?")
        _write(setting, measured, folder / results.file_name(setting, measured["plain"].device_name, sweep))


def _write(setting: Setting, measured: dict[str, Measured], path: Path) -> None:
    for it in measured.values():
        if it.tensor_peak is None and not it.note:
            it.note = "not measured: the run was ended before"
    rows = results.make(setting, measured)
    for row in rows:
        print(f"  {_line(row)}", flush=True)
    results.merge(path, rows)
    print(f"  wrote {path}", flush=True)


def _line(row: results.Row) -> str:
    if row["note"]:
        return f"{row['method']}: {row['note']}"
    line = f"{row['method']}: tensors {row['tensor_peak_mib']} MiB ({row['tensor_peak_over_plain']} of plain), "
    line += f"process {row['process_peak_mib']} MiB, first step {row['first_step_s']} s"
    if row["rounds"] == "0":
        return line
    return f"{line}, step {row['step_s_median']} s ({row['time_over_plain_median']} of plain)"


def _device(name: str) -> str:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"no CUDA device for --device {name}: run it on a machine with one, or take --device cpu")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is known is written
    start(run)
