"""What was measured as rows with their provenance, and the CSV files that hold them."""

import csv
import datetime
import re
import statistics
import subprocess
from pathlib import Path

import torch
from settings import Setting
from turns import Measured

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, str]

# A row measured again takes the place of the one that agrees with it in these.
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
)
COLUMNS = (
    *("model", "method", "batch_size", "image_size", "precision", "layout", "allocator"),
    *("tensor_peak_mib", "tensor_peak_over_plain", "process_peak_mib", "process_peak_over_plain"),
    *("step_s_median", "step_s_q1", "step_s_q3"),
    *("time_over_plain_median", "time_over_plain_q1", "time_over_plain_q3"),
    *("rounds", "first_step_s", "note", "device", "device_name", "threads", "torch", "date", "commit"),
)


def make(setting: Setting, measured: dict[str, Measured]) -> list[Row]:
    return [_row(setting, method, it, measured["plain"]) for method, it in measured.items()]


def _row(setting: Setting, method: str, it: Measured, plain: Measured) -> Row:
    values = {
        "model": setting.model,
        "method": method,
        "batch_size": setting.batch_size,
        "image_size": setting.image_size,
        "precision": setting.precision,
        "layout": setting.layout,
        "allocator": it.allocator or plain.allocator,
        "tensor_peak_mib": _mib(it.tensor_peak),
        "tensor_peak_over_plain": _ratio(it.tensor_peak, plain.tensor_peak),
        "process_peak_mib": _mib(it.process_peak),
        "process_peak_over_plain": _ratio(it.process_peak, plain.process_peak),
        **_quartiles("step_s", it.times, 5),
        **_quartiles("time_over_plain", it.ratios, 3),
        "rounds": len(it.times),
        "first_step_s": "" if it.first_step_s is None else f"{it.first_step_s:.2f}",
        "note": it.note,
        "device": setting.device.split(":")[0],
        "device_name": it.device_name or plain.device_name,
        "threads": setting.threads,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }
    return {name: str(values[name]) for name in COLUMNS}


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f}"


def _ratio(ours: int | None, plain: int | None) -> str:
    return f"{ours / plain:.3f}" if ours is not None and plain else ""


def _quartiles(name: str, values: list[float], digits: int) -> Row:
    """The three quartiles, by linear interpolation between what was measured."""
    found = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    shown = [f"{value:.{digits}f}" for value in found] or ["", "", ""]
    return dict(zip((f"{name}_q1", f"{name}_median", f"{name}_q3"), shown, strict=True))


def commit() -> str:
    """The commit of the code that was measured, with a plus sign where the code has changed since."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--", "efficient_densenet", "benchmarks/*.py") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def file_name(setting: Setting, device_name: str, sweep: str = "") -> str:
    """<device>_torch<version>_<model>_<batch>.csv; a sweep has a file of its own, whatever it ranges over."""
    device = "cpu" if setting.device == "cpu" else re.sub(r"\W+", "_", device_name).lower()
    subject = {"depth": "depth_sweep", "batch": f"{setting.model}_batch_sweep"}.get(sweep)
    version = torch.__version__.split("+")[0]
    return f"{device}_torch{version}_{subject or f'{setting.model}_{setting.batch_size}'}.csv"


def read(path: Path) -> list[Row]:
    """A file's rows; none where it holds something else."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        return list(table) if tuple(table.fieldnames or ()) == COLUMNS else []


def merge(path: Path, rows: list[Row]) -> None:
    """Write `rows` to the file, in the place of those of the same configuration and beside all others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {tuple(row[name] for name in KEY): row for row in read(path)}
    kept |= {tuple(row[name] for name in KEY): row for row in rows}
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(kept.values())
