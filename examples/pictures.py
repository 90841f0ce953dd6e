"""Pictures of results, in colors that everyone can tell apart."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor
from torchmetrics.functional.classification import binary_roc

BLUE, GRAY = "#0072B2", "0.6"
CLASSES = ["#56B4E9", "#D55E00", "#999999", "#0072B2", "#F0E442", "#009E73", "#CC79A7", "#E69F00", "#332288", "#882255",
           "#000000", "#44AA99", "#661100", "#DDDDDD", "#AA4499", "#6699CC"]  # fmt: skip
"""Colors for classes: those of Okabe and Ito first, then some of Paul Tol's. Past their number they come again."""


def grid(
    title: str, num: int, columns: int, size: float = 2.6, aspect: float = 1, **options: bool
) -> tuple[Figure, list[Axes]]:
    """A figure with `num` axes in rows of `columns`, each `size` inches wide and `aspect` times as high."""
    columns = min(columns, num)
    rows = -(-num // columns)
    figure = Figure((max(size * columns, 4.5), size * aspect * rows + 0.8), layout="constrained", dpi=120)
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
    for unused in axes[num:]:
        unused.remove()
    return figure, axes[:num]


def show(axes: Axes, image: np.ndarray, title: str = "", heat: np.ndarray | None = None, aspect: float = 1) -> None:
    """A gray picture, and a map from 0 to 1 over it, clear where it is 0; a pixel is `aspect` times as high as wide."""
    axes.imshow(image, cmap="gray", aspect=aspect)
    if heat is not None:
        axes.imshow(heat, cmap="plasma", alpha=0.65 * heat.clip(0, 1), vmin=0, vmax=1, aspect=aspect)
    axes.set_title(title, fontsize="small")
    axes.set_axis_off()


def roc(path: Path, name: str, scores: list[Tensor], targets: list[Tensor], table: pd.DataFrame) -> None:
    """A curve for each row of a table of AUROCs."""
    figure, axes = grid(f"ROC curves, {name}", len(table), 4, sharex=True, sharey=True)
    for each, some_scores, some_targets, row in zip(axes, scores, targets, table.itertuples(), strict=True):
        each.plot([0, 1], [0, 1], color=GRAY, linewidth=0.8, linestyle="--")
        text = "all alike, no curve"
        if not np.isnan(row.auroc):
            false_positive_rate, true_positive_rate, _ = binary_roc(some_scores, some_targets)
            each.plot(false_positive_rate, true_positive_rate, color=BLUE, linewidth=1.8)
            text = f"AUROC {row.auroc:.2f}\n{row.low:.2f} to {row.high:.2f}"
        each.text(0.97, 0.05, text, ha="right", fontsize="small")
        each.set_title(row.label.replace("_", " "), fontsize="medium")
        each.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], aspect="equal")
        each.tick_params(labelbottom=True, labelleft=True)
        each.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("false positive rate (1 − specificity)", fontsize="medium")
    figure.supylabel("true positive rate (sensitivity)", fontsize="medium")
    figure.savefig(path)


def confusion(path: Path, name: str, matrix: np.ndarray, classes: list[str], unit: str) -> None:
    """For each class (a row) what part of its pixels or volumes, in percent, is given which class."""
    percent = 100 * matrix / matrix.sum(1, keepdims=True).clip(1)
    size = 0.55 * len(classes) + 2.5
    figure = Figure((size + 0.6, size), layout="constrained", dpi=120)
    axes = figure.subplots()
    shown = axes.imshow(percent, cmap="cividis", vmin=0, vmax=100)
    for (row, column), value in np.ndenumerate(percent):
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", color="black" if value > 55 else "white")
    axes.set_xticks(range(len(classes)), classes, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(classes)), classes)
    axes.set(xlabel="predicted", ylabel="truth", title=f"Confusion matrix, {name}")
    figure.colorbar(shown, label=f"% of the class's {unit}", shrink=0.8, ticks=range(0, 101, 25))
    figure.savefig(path)


def overlays(path: Path, title: str, image: np.ndarray, maps: dict[str, np.ndarray | None], classes: list[str]) -> None:
    """A picture beside itself with each map of class numbers over it, and the colors of the classes."""
    height, width = image.shape[:2]
    figure, axes = grid(title, len(maps), len(maps), size=4, aspect=height / width)
    colors = np.array([to_rgb(CLASSES[i % len(CLASSES)]) for i in range(len(classes))])
    for each, (text, numbers) in zip(axes, maps.items(), strict=True):
        each.imshow(image.clip(0, 1))
        if numbers is not None:
            has_class = (numbers < len(classes))[..., None]
            over = np.where(has_class, colors[np.where(has_class[..., 0], numbers, 0)], 0)
            each.imshow(np.concatenate([over, 0.65 * has_class], 2))
        each.set_title(text, fontsize="medium")
        each.set_axis_off()
    handles = [Patch(color=color, label=label) for color, label in zip(colors, classes, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(classes), 6), frameon=False)
    figure.savefig(path)


def planes(path: Path, title: str, volume: np.ndarray, heat: np.ndarray, spacing: list[float]) -> None:
    """The middle slices of a volume whose axes go to the right, to the front and up, as radiologists see them; below,
    a map over them."""
    figure, axes = grid(title, 6, 3, size=3)
    for i, (text, axis, left) in enumerate((("axial", 2, "R"), ("coronal", 1, "R"), ("sagittal", 0, "A"))):
        across, up = (j for j in range(3) if j != axis)
        image, over = (np.rot90(np.take(each, each.shape[axis] // 2, axis))[:, ::-1] for each in (volume, heat))
        show(axes[i], image, text, aspect=spacing[up] / spacing[across])
        axes[i].text(0.02, 0.5, left, color="white", va="center", transform=axes[i].transAxes)
        show(axes[3 + i], image, heat=over, aspect=spacing[up] / spacing[across])
    figure.savefig(path)


def contours(
    path: Path, title: str, volume: np.ndarray, maps: dict[str, np.ndarray], spacing: list[float], classes: list[str]
) -> None:
    """Slices of a volume through the middle of what is labelled, with the classes' contours in each map of numbers."""
    figure, axes = grid(title, 3 * len(maps), 3, size=3)
    places = np.argwhere(next(iter(maps.values())))
    middle = places.mean(0).round().astype(int) if len(places) else np.array(volume.shape) // 2
    for row, (text, numbers) in enumerate(maps.items()):
        for i, (plane, axis) in enumerate((("axial", 2), ("coronal", 1), ("sagittal", 0))):
            across, up = (j for j in range(3) if j != axis)
            image, over = (np.rot90(np.take(each, middle[axis], axis))[:, ::-1] for each in (volume, numbers))
            show(axes[3 * row + i], image, f"{text}, {plane}", aspect=spacing[up] / spacing[across])
            for number in range(1, len(classes)):
                if (over == number).any():
                    axes[3 * row + i].contour(over == number, [0.5], colors=CLASSES[number - 1], linewidths=1.2)
    handles = [Patch(color=CLASSES[i - 1], label=classes[i]) for i in range(1, len(classes))]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False)
    figure.savefig(path)
