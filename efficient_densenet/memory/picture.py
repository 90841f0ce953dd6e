"""A picture of the memory of a training step over its allocations."""

from collections.abc import Sequence
from pathlib import Path

from .._extras import need
from .step import StepMemory


def draw(step: StepMemory, path: str | Path, title: str, measured: Sequence[int] = ()) -> None:
    """Write the memory that tensors hold during a step, by the parts of the model that run, to an image file.

    `measured` are the bytes after each allocation of a real step, which are drawn over the predicted ones.
    """
    need("matplotlib", extra="demos")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="share of the step's allocations", ylabel="MiB of tensors", title=title)
    moments = step.trace.moments
    names = list(dict.fromkeys(moment.part for moment in moments))
    start = 0
    for i in range(1, len(moments) + 1):
        if i == len(moments) or moments[i].part != moments[start].part:
            shares = [j / len(moments) for j in range(start, min(i + 1, len(moments)))]
            sizes = [moment.bytes / 2**20 for moment in moments[start : i + 1]]
            part = moments[start].part
            label = part if not moments[start].is_backward else "_"  # a label for the forward alone
            axes.fill_between(shares, sizes, color=f"C{names.index(part) % 10}", label=label, linewidth=0)
            start = i
    backward = next((i for i, moment in enumerate(moments) if moment.is_backward), len(moments))
    axes.axvline(backward / max(len(moments), 1), color="black", linestyle=":", label="the backward starts")
    if measured:
        shares = [i / len(measured) for i in range(len(measured))]
        axes.plot(shares, [size / 2**20 for size in measured], color="black", linewidth=0.7, label="measured")
    axes.set(xlim=(0, 1), ylim=(0, None))
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)
