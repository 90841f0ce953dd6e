"""Measurements as rows with their provenance, in CSV files."""

import csv
import datetime
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from comparison import Measurement
from methods import Setting
from worker import device_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = (
    "efficient_densenet",
    *(f"benchmarks/{name}.py" for name in ("comparison", "crossover", "gpu_host", "methods", "worker")),
)
"""What was measured, and how: rows are as old as the last change of these files."""
Row = dict[str, str]
INTERRUPTED = "not measured"

KEY = (
    "model",
    "method",
    "batch_size",
    "image_size",
    "precision",
    "layout",
    "allocator",
    "device",
    "device_name",
    "threads",
    "devices",
    "card_gb",
)
"""The columns that identify a configuration. A new row replaces the old one with the same values in them."""
COLUMNS = (
    *("model", "method", "kernels", "batch_size", "image_size", "precision", "layout", "allocator"),
    *("tensor_peak_mib", "tensor_peak_over_plain", "process_peak_mib", "process_peak_over_plain"),
    "step_peak_mib",
    *("step_s_median", "step_s_q1", "step_s_q3", "host_s_median"),
    *("time_over_plain_median", "time_over_plain_q1", "time_over_plain_q3"),
    *("rounds", "first_step_s", "note", "device", "device_name", "threads", "devices", "card_gb"),
    *("torch", "date", "commit"),
)
NEWER_COLUMNS = {"kernels", "step_peak_mib", "host_s_median", "devices", "card_gb"}
"""Columns that older files lack: the kernels that the shared engine runs (Triton, Numba, portable), the peak of a step
that makes its gradients anew, which count, the host's part of a step on a GPU, the number of devices where it is not
one, and the size of a card where PyTorch was given no more than that of a larger one."""


def make(setting: Setting, measurements: dict[str, Measurement]) -> list[Row]:
    """Return one row for each method."""
    plain = measurements["plain"]
    return [_row(setting, method, measurement, plain) for method, measurement in measurements.items()]


def _row(setting: Setting, method: str, measurement: Measurement, plain: Measurement) -> Row:
    values = {
        "model": setting.model,
        "method": method,
        "kernels": measurement.kernels,
        "batch_size": setting.batch_size,
        "image_size": setting.image_size,
        "precision": setting.precision,
        "layout": setting.layout,
        "allocator": measurement.allocator or plain.allocator,
        "tensor_peak_mib": _mib(measurement.tensor_peak),
        "tensor_peak_over_plain": _ratio(measurement.tensor_peak, plain.tensor_peak),
        "process_peak_mib": _mib(measurement.process_peak),
        "process_peak_over_plain": _ratio(measurement.process_peak, plain.process_peak),
        "step_peak_mib": _mib(measurement.step_peak),
        **quartiles("step_s", measurement.times, 5),
        "host_s_median": _median(measurement.host_times) if setting.device != "cpu" else "",
        **quartiles("time_over_plain", measurement.ratios, 3),
        "rounds": len(measurement.times),
        "first_step_s": "" if measurement.first_step_s is None else f"{measurement.first_step_s:.2f}",
        "note": measurement.note,
        "device": setting.device.split(":")[0],
        "device_name": measurement.device_name or plain.device_name,
        "threads": setting.threads,
        "devices": setting.devices if setting.devices > 1 else "",
        "card_gb": setting.card_gb or "",
        **provenance(),
    }
    return {name: str(values[name]) for name in COLUMNS}


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f}"


def _ratio(ours: int | None, plain: int | None) -> str:
    return f"{ours / plain:.3f}" if ours is not None and plain else ""


def _median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.5f}" if seconds else ""


def quartiles(name: str, values: list[float], digits: int) -> Row:
    """Return the three quartiles of `values`, by linear interpolation."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    texts = [f"{value:.{digits}f}" for value in quartiles] or ["", "", ""]
    return dict(zip((f"{name}_q1", f"{name}_median", f"{name}_q3"), texts, strict=True))


def provenance() -> Row:
    """Return what every row of a file of measurements ends with: PyTorch's version, the date, and the commit."""
    return {"torch": torch.__version__, "date": datetime.date.today().isoformat(), "commit": commit()}


def commit() -> str:
    """Return the last commit that changed what is measured, with a plus sign if there are uncommitted changes."""
    try:
        head = git("log", "-1", "--format=%h", "--abbrev=7", "--", *MEASURED)
        return head + ("+" if git("status", "--porcelain", "--", *MEASURED) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def stem(setting: Setting, device_name: str, sweep: str = "") -> str:
    """Return a file's name: <device>_torch<version>_<model>_<batch size>, with another end for a sweep."""
    device = "cpu" if setting.device == "cpu" else re.sub(r"\W+", "_", device_name).lower()
    of_one = f"{setting.model}_{setting.batch_size}" if not sweep else f"{setting.model}_{sweep}_sweep"
    subject = f"{sweep}_sweep" if sweep in ("activations", "depth", "users") else of_one
    version = torch.__version__.split("+")[0]
    return f"{device}_torch{version}_{'inference_' if setting.inference else ''}{subject}"


def read(path: Path) -> list[Row]:
    """Return the rows of a file, or no rows if it is not a file of measurements."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if not set(COLUMNS) - NEWER_COLUMNS <= set(reader.fieldnames or ()) <= set(COLUMNS):
            return []
        return [dict.fromkeys(COLUMNS, "") | row for row in reader]


def read_others(path: Path, column: str) -> list[Row]:
    """The rows that `write` has written with this column, or no rows if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return rows if rows and column in rows[0] else []


def write(path: Path, measured: list[dict[str, Any]]) -> None:
    """Write the rows to a file of their own columns, in the place of its former ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(measured[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(measured)
    print(f"wrote {path}")


def of_this_commit(rows: list[Row]) -> list[Row]:
    """The rows that need not be measured again: those of this commit, on this processor or GPU."""
    now, kinds = commit(), ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    devices = {device_name(torch.device(kind)) for kind in kinds}
    here = [row for row in rows if row["commit"] == now and "+" not in now and row["device_name"] in devices]
    return [row for row in here if INTERRUPTED not in row.get("note", "")]


def has(path: Path, setting: Setting, methods: list[str], rounds: int) -> bool:
    """Whether the file has a row of this commit for each method, of that many rounds or with the reason why not."""
    names = "model", "batch_size", "image_size", "precision", "layout", "threads"
    key = [str(getattr(setting, name)) for name in names]
    count = str(setting.devices) if setting.devices > 1 else ""
    rows = [row for row in of_this_commit(read(path)) if [row[name] for name in names] == key]
    done = [row for row in rows if row["devices"] == count and (row["note"] or int(row["rounds"]) >= rounds)]
    return set(methods) <= {row["method"] for row in done}


def merge(path: Path, rows: list[Row], missing: bool = False) -> None:
    """Write `rows` to the file. They replace rows of the same configuration; other rows stay, or with `missing` those
    of this commit alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = of_this_commit(read(path)) if missing else read(path)
    merged = {tuple(row[name] for name in KEY): row for row in before}
    merged |= {tuple(row[name] for name in KEY): row for row in rows}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged.values())
