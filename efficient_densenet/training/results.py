"""The table of a run and its picture."""

import io
from pathlib import Path
from typing import Any

from .._extras import need
from . import files

COLUMNS = (
    "epoch",
    "train_loss",
    "train_error",
    "valid_loss",
    "valid_error",
    "test_error",
    "seconds",
    "images_per_second",
    "peak_memory_mib",
    "lr",
)
"""`test_error` stands in the last epoch's row alone: the best epoch's model is tested once, when all is done."""

Row = dict[str, Any]


def save_table(folder: Path, rows: list[Row]) -> None:
    files.write_whole(folder / "results.csv", files.table([{c: row[c] for c in COLUMNS} for row in rows]))


def draw_curves(folder: Path, rows: list[Row], title: str) -> None:
    need("matplotlib", extra="demos")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    epochs = [row["epoch"] for row in rows]
    for axes, what, unit in zip(figure.subplots(1, 2), ("loss", "error"), ("nats", "% of the pictures"), strict=True):
        scale = 100 if what == "error" else 1
        for name, colour in (("train", "tab:blue"), ("valid", "tab:orange")):
            values = [scale * row[f"{name}_{what}"] for row in rows]
            axes.plot(epochs, values, color=colour, label=name, marker="." if len(rows) < 40 else None)
        axes.set(xlabel="epoch", ylabel=f"{what}, {unit}", yscale="log" if what == "loss" else "linear")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    tested = rows[-1]["test_error"]
    figure.suptitle(title if tested == "" else f"{title}: test error {tested:.2%}")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    files.write_whole(folder / "curves.png", drawn.getvalue())


class Events:
    """TensorBoard's files, where they are asked for."""

    def __init__(self, folder: Path, wanted: bool, next_epoch: int) -> None:
        self.writer = None
        if wanted:
            need("tensorboard", extra="tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=next_epoch)

    def add(self, row: Row) -> None:
        if self.writer is None:
            return
        for column in COLUMNS[1:]:
            if row[column] != "":
                self.writer.add_scalar(column, row[column], row["epoch"])
        self.writer.flush()
