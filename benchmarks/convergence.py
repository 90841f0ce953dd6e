"""Do the engines converge alike? Trains a small network by each, with several seeds, and draws the errors of all runs.

    python benchmarks/convergence.py train --data cifar_images     what is not trained yet; goes on where it was stopped
    python benchmarks/convergence.py draw                          the figure, and a table for docs/benchmarks.md

A run is one of demos/cp_demo.py. When it is complete its results.csv is kept in benchmarks/results/convergence. Runs of
other sizes are a study of another name, by --study.
"""

import csv
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import fire
import plot
import rows as results
from settings import as_list
from training.files import write_atomic

from efficient_densenet._extras import need

STUDY = "convergence"
"""The name of the runs: of their folder in benchmarks/results, of that in checkpoints, and of the figure."""
KEPT = results.RESULTS
RUNS = results.ROOT / "checkpoints"

VARIANTS = {
    "plain": ["--engine", "plain"],
    "shared": ["--engine", "shared"],
    "plain_bf16": ["--engine", "plain", "--amp", "bf16"],
    "shared_bf16": ["--engine", "shared", "--amp", "bf16"],
}
COLORS = {
    "plain": plot.COLORS["plain"],
    "shared": plot.COLORS["shared"],
    "plain_bf16": plot.COLORS["compile_plain"],
    "shared_bf16": plot.COLORS["checkpoint"],
}

Rows = list[dict[str, str]]


def train(
    data: str | None = None,
    images_per_class: int = 1000,
    variants: Any = "shared,plain,shared_bf16",
    seeds: Any = "0,1,2",
    depth: int = 40,
    n_epochs: int = 30,
    device: str = "cpu",
    study: str = STUDY,
) -> None:
    """Train each variant with each seed, by the one-cycle recipe, unless its results are kept already.

    Args:
        data: a folder of images with train/ and test/; the digits of the package without it.
        images_per_class: so many images of each class are trained on, the first by name; all test images are used.
        variants: of plain, shared, plain_bf16 and shared_bf16.
        seeds: one run for each.
        depth: of a DenseNet-BC with growth rate 12.
        n_epochs: epochs.
        device: cpu or cuda.
        study: the folder of the runs in checkpoints, and of their results in benchmarks/results.
    """
    names = as_list(variants)
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ValueError(f"unknown variant {unknown[0]!r}: there are {', '.join(VARIANTS)}")
    source = [] if data is None else ["--data", str(_subset(Path(data), images_per_class, RUNS / study))]
    sizes = ["--depth", str(depth), "--n_epochs", str(n_epochs), "--device", device]
    recipe = ["--recipe", "one_cycle", "--weight_decay", "5e-4"]
    for seed in as_list(seeds):
        for name in names:
            kept, run = KEPT / study / f"{name}_seed{seed}.csv", RUNS / study / f"{name}_seed{seed}"
            if kept.exists():
                continue
            where = ["--save", str(run), "--resume", "auto", "--seed", str(seed)]
            demo = str(results.ROOT / "demos" / "cp_demo.py")
            subprocess.run([sys.executable, demo, *source, *where, *sizes, *recipe, *VARIANTS[name]], check=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(kept, (run / "results.csv").read_bytes())


def _subset(data: Path, images_per_class: int, folder: Path) -> Path:
    """A folder of links to the images that are used."""
    subset = folder / f"images_{images_per_class}_a_class"
    for split, limit in (("train", images_per_class), ("test", None)):
        for folder in sorted(path for path in (data / split).iterdir() if path.is_dir()):
            target = subset / split / folder.name
            target.mkdir(parents=True, exist_ok=True)
            for image in sorted(folder.iterdir())[:limit]:
                if not (target / image.name).exists():
                    (target / image.name).symlink_to(image.absolute())
    return subset


def draw(folder: str = "", study: str = STUDY) -> None:
    """Draw benchmarks/figures/convergence.svg from all kept results, and print a table.

    Args:
        folder: where to write the figure. Default: benchmarks/figures.
        study: the name of the runs, and of the figure.
    """
    runs = read(study)
    if not runs:
        raise ValueError(f"nothing to draw in {KEPT / study}: train first")
    target = (Path(folder) if folder else plot.FIGURES) / f"{study}.svg"
    with need("matplotlib", extra="bench").rc_context(plot.STYLE):
        source = "; ".join(plot.fingerprint(path) for path in sorted((KEPT / study).glob("*.csv")))
        _figure(runs).savefig(target, transparent=True, metadata={"Date": None, "Source": source})
    print(f"wrote {target}")
    print(table(runs))


def read(study: str = STUDY) -> dict[str, list[Rows]]:
    """The rows of every kept run, by variant."""
    runs: dict[str, list[Rows]] = {}
    for name in VARIANTS:
        for path in sorted((KEPT / study).glob(f"{name}_seed*.csv")):
            with path.open(newline="") as file:
                runs.setdefault(name, []).append(list(csv.DictReader(file)))
    return runs


def table(runs: dict[str, list[Rows]]) -> str:
    """For each variant the test errors of its seeds, the peak of its process's memory, and its hours, as Markdown.

    The hours are those of epochs that all take as long as the median one: other work on the machine slows some of them.
    """
    lines = [
        "| engine | seeds | test error: median (range) | memory of the process | hours at the median epoch |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, seeds in runs.items():
        errors = [float(rows[-1]["test_error"]) for rows in seeds]
        memory = max(float(row["peak_memory_mib"]) for rows in seeds for row in rows)
        seconds = statistics.median(float(row["seconds"]) for rows in seeds for row in rows)
        hours = seconds * statistics.median(map(len, seeds)) / 3600
        spread = f"{statistics.median(errors):.2%} ({min(errors):.2%} to {max(errors):.2%})"
        lines.append(f"| `{name}` | {len(seeds)} | {spread} | {memory:,.0f} MiB | {hours:.2f} |")
    return "\n".join(lines)


def _figure(runs: dict[str, list[Rows]]) -> Any:
    figure = need("matplotlib.figure", extra="bench").Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, seeds in runs.items():
        for i, rows in enumerate(seeds):
            epochs, errors = zip(*((int(row["epoch"]), 100 * float(row["valid_error"])) for row in rows), strict=True)
            axes.plot(epochs, errors, color=COLORS[name], linewidth=1, label=None if i else name)
    axes.set(xlabel="epoch", ylabel="validation error, %", yscale="log")
    axes.grid(alpha=0.2, color=plot.GRAY, which="both")
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    fire.Fire({"train": train, "draw": draw})
