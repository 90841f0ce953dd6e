"""Draw the figures. Each is drawn from one CSV file of measurements and named after it, or from a directory of runs.

    python benchmarks/plot.py                                                    all that are in benchmarks/figures
    python benchmarks/plot.py cpu_torch2.14.1_depth_sweep.csv --methods plain,shared
    python benchmarks/plot.py convergence                                        the errors of runs

A depth sweep shows memory against depth, a batch sweep memory against batch size, a crossover time against plain's.
Text is gray, colors are of medium brightness, and the background is transparent, so that light and dark pages suit.
"""

import csv
import hashlib
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rows as results
from methods import as_list
from options import run_command

from efficient_densenet._extras import need

FIGURES = results.ROOT / "benchmarks" / "figures"
GRAY = "#808080"
COLORS = {
    "plain": "#d55e00",
    "shared": "#0072b2",
    "shared_keep": "#56b4e9",
    "shared_portable": "#7f9fb8",
    "checkpoint": "#009e73",
    "official": "#cc79a7",
    "checkpoint_function": "#b3628f",
    "torchvision": "#e69f00",
    "torchvision_efficient": "#e69f00",
    "torchvision_converted": "#8a5a1e",
    "compile_plain": "#a65400",
    "compile_shared": "#4b5fa5",
    "graph_plain": "#f0a884",
    "graph_shared": "#00507d",
}
"""Okabe and Ito's colors for the engines, which color-blind people tell apart, and others near them."""
COLORS |= {f"{name}_channels_last": COLORS[name] for name in ("plain", "shared", "compile_plain")}
RUN_COLORS = COLORS | {"plain_bf16": COLORS["compile_plain"], "shared_bf16": COLORS["checkpoint"]}
Run = list[dict[str, str]]
"""The rows of a run's results.csv, which demos/cp_demo.py writes."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "efficient_densenet",
    "font.family": "sans-serif",
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
}


def plot(*files: str, methods: str | list[str] | None = None, folder: str = "") -> None:
    """Draw the figures of CSV files in benchmarks/results as SVG files in benchmarks/figures.

    Args:
        files: their names in benchmarks/results, or paths, also of a directory of runs, <engine>_seed<number>.csv.
            Default: those whose figures are there.
        methods: names of methods. Default: all.
        folder: where to write the figures. Default: benchmarks/figures.
    """
    drawn = [results.RESULTS / path.stem for path in sorted(FIGURES.glob("*.svg"))]
    paths = [path if path.is_dir() else Path(f"{path}.csv") for path in drawn]
    if files:
        paths = [Path(file) if "/" in file else results.RESULTS / file for file in files]
    for path in paths:
        save(path, Path(folder) if folder else FIGURES, as_list(methods) if methods else None)


def save(path: Path, folder: Path, methods: list[str] | None = None) -> None:
    """Draw the figure of a file or a directory. Its metadata contains the fingerprint of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{path.stem}.svg"
    source = "; ".join(map(fingerprint, sorted(path.glob("*_seed*.csv")) if path.is_dir() else [path]))
    with need("matplotlib", extra="bench").rc_context(STYLE):
        figure = _plot_runs(read_runs(path)) if path.is_dir() else draw(path, methods)
        figure.savefig(target, transparent=True, metadata={"Date": None, "Source": source})
    print(f"wrote {target}")


def fingerprint(path: Path) -> str:
    """Return the name and the hash of a file, which a figure contains as the source of its data."""
    return f"{path.name} sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def draw(path: Path, methods: list[str] | None = None) -> Any:
    """Return the matplotlib figure of a file."""
    if points := results.read_others(path, "point"):
        return _plot_crossover(points)
    rows = [row for row in results.read(path) if not row["note"] and (not methods or row["method"] in methods)]
    if not rows:
        raise ValueError(f"nothing to draw in {path}: measure with python benchmarks/run.py, or give other methods")
    if path.stem.endswith("_depth_sweep"):
        return _plot_sweep(rows, depth, "depth (layers)")
    return _plot_sweep(rows, lambda row: int(row["batch_size"]), "batch size (images)")


def depth(row: results.Row) -> int:
    """Return the number of layers that a model's name contains: 100 for densenet_bc_100_12."""
    return int(re.findall(r"\d+", row["model"])[0])


def _figure(width: float) -> Any:
    return need("matplotlib.figure", extra="bench").Figure(figsize=(width, 3.6), layout="constrained")


def _plot_sweep(rows: list[results.Row], position: Callable[[results.Row], int], label: str) -> Any:
    """Plot memory against depth or batch size: one line for each method, labeled at its end."""
    rows = [row for row in rows if _properties(row) == _properties(rows[0])]
    figure = _figure(6.4)
    axes = figure.subplots()
    ends = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        points = sorted((position(row), float(row["tensor_peak_mib"])) for row in rows if row["method"] == method)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=COLORS[method])
        ends[method] = points[-1]
    axes.set(xlabel=label, ylabel="tensor peak of a step, MiB")
    axes.set_title(_title(rows), fontsize=10, loc="left")
    axes.grid(alpha=0.2, color=GRAY)
    _label(axes, ends)
    return figure


def _plot_crossover(rows: list[results.Row]) -> Any:
    """Plot the time over plain's against plain's time: one color for each set of kernels, one marker for each number of
    dimensions."""
    figure = _figure(6.4)
    axes = figure.subplots()
    for kernels, color in (("numba", COLORS["shared"]), ("portable", COLORS["shared_portable"])):
        for dims, marker in (("1", "^"), ("2", "s"), ("3", "o")):
            points = [row for row in rows if row["kernels"] == kernels and row["point"].endswith(f"^{dims}")]
            x, y = ([float(row[name]) for row in points] for name in ("plain_ms", "time"))
            axes.scatter(x, y, s=18, marker=marker, color=color, label=f"{kernels}, dims={dims}")
    axes.axhline(1, color=COLORS["plain"], linewidth=1)
    axes.set(xlabel="time of plain's step, ms", ylabel="time / plain's", xscale="log", ylim=(0, None))
    first = rows[0]
    axes.xaxis.set_major_formatter("{x:g}")
    threads = f"{first['threads']} CPU thread{'' if first['threads'] == '1' else 's'}"
    title = f"efficient=True, {threads}, PyTorch {first['torch'].split('+')[0]}"
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.2, color=GRAY)
    axes.legend(frameon=False, ncols=2)
    return figure


def read_runs(folder: Path) -> dict[str, list[Run]]:
    """The runs in a directory by engine, in the order of their seeds."""
    runs: dict[str, list[Run]] = {}
    for path in sorted(folder.glob("*_seed*.csv"), key=lambda path: path.stem.partition("_seed")):
        with path.open(newline="") as file:
            runs.setdefault(path.stem.partition("_seed")[0], []).append(list(csv.DictReader(file)))
    if not runs:
        raise ValueError(f"no <engine>_seed<number>.csv in {folder}: copy the results.csv of runs of demos/cp_demo.py")
    return runs


def table_of_runs(runs: dict[str, list[Run]]) -> str:
    """A Markdown table of each engine's test errors by seed, and the peak of its process's memory."""
    lines = ["| engine | seeds | test error: median (range) | memory of the process |", "|---|---:|---:|---:|"]
    for name, seeds in runs.items():
        errors = [float(rows[-1]["test_error"]) for rows in seeds]
        memory = max(float(row["peak_memory_mib"]) for rows in seeds for row in rows)
        spread = f"{statistics.median(errors):.2%} ({min(errors):.2%} to {max(errors):.2%})"
        lines.append(f"| `{name}` | {len(seeds)} | {spread} | {memory:,.0f} MiB |")
    return "\n".join(lines)


def _plot_runs(runs: dict[str, list[Run]]) -> Any:
    """Plot the validation error against the epoch: one line for each run."""
    figure = _figure(7.2)
    axes = figure.subplots()
    for name, seeds in runs.items():
        for i, rows in enumerate(seeds):
            epochs, errors = zip(*((int(row["epoch"]), 100 * float(row["valid_error"])) for row in rows), strict=True)
            axes.plot(epochs, errors, color=RUN_COLORS[name], linewidth=1, label=None if i else name)
    axes.set(xlabel="epoch", ylabel="validation error, %", yscale="log")
    axes.yaxis.set_major_locator(need("matplotlib.ticker", extra="bench").LogLocator(subs=range(1, 10)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.2, color=GRAY)
    axes.legend(frameon=False)
    return figure


def _label(axes: Any, points: dict[str, tuple[float, float]]) -> None:
    """Write each method's name beside its point, moved up if it would overlap with the name below."""
    axes.margins(y=0.15)
    axes.set(xlim=(0, None), ylim=(0, None))
    width, line = axes.get_xlim()[1] / 3, axes.get_ylim()[1] / 15
    placed: list[tuple[float, float]] = []
    for method, (x, y) in sorted(points.items(), key=lambda item: item[1][1]):
        height = max([y, *(other_y + line for other_x, other_y in placed if abs(other_x - x) < width)])
        placed.append((x, height))
        name, offset = method.replace("_", " "), {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(name, (x, height), **offset, color=COLORS[method], annotation_clip=False)


def _title(rows: list[results.Row]) -> str:
    """The model and the batch size that all rows have in common, and where they were measured."""
    first = rows[0]
    models, batches = ({row[name] for row in rows} for name in ("model", "batch_size"))
    common = models.pop() if len(models) == 1 else "DenseNet-BC, growth rate 12"
    common += f", batch {batches.pop()}" if len(batches) == 1 else ""
    device = f"{first['threads']} CPU threads" if first["device"] == "cpu" else first["device_name"]
    return f"{common}, {device}, PyTorch {first['torch'].split('+')[0]}"


def _properties(row: results.Row) -> tuple[str, ...]:
    return row["precision"], row["layout"], row["allocator"]


if __name__ == "__main__":
    run_command(plot)
