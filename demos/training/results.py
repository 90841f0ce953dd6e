"""The results of a run as files: results.csv and curves.png."""

import csv
import io
from pathlib import Path
from typing import Any

from . import files

Row = dict[str, Any]


def save_csv(folder: Path, rows: list[Row]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    files.write_atomic(folder / "results.csv", text.getvalue().encode())


def plot_curves(folder: Path, rows: list[Row], model: str, data: str) -> None:
    """Draw losses and errors of each epoch; `data` is the data set's name, which may end in a path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    epochs = [row["epoch"] for row in rows]
    for axes, metric, unit in zip(figure.subplots(1, 2), ("loss", "error"), ("nats", "% of the images"), strict=True):
        scale = 100 if metric == "error" else 1
        for split, color in (("train", "#0072b2"), ("valid", "#d55e00")):
            if rows[0][f"{split}_{metric}"] == "":
                continue  # there were no images to validate by
            values = [scale * row[f"{split}_{metric}"] for row in rows]
            axes.plot(epochs, values, color=color, label=split, marker="." if len(rows) < 40 else None)
        axes.set(xlabel="epoch", ylabel=f"{metric}, {unit}")
        if metric == "loss":
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(5))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    title, test_error = f"{model}, {Path(data).name}", rows[-1]["test_error"]
    figure.suptitle(title if test_error == "" else f"{title}: test error {test_error:.2%}")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    files.write_atomic(folder / "curves.png", png.getvalue())
