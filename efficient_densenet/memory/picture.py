"""A picture of the memory of a training step, over the parts of the model that run."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from .._extras import need
from .card import CardFit, usable
from .predict import MemoryEstimate
from .sizes import format_bytes, parse_bytes
from .trace import Moment

_MIB, _GIB = 1 << 20, 1 << 30
COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")
"""Okabe and Ito's colors, which color-blind people tell apart."""
Visit = tuple[str, bool, int]
"""A part's name, whether it runs in the backward, and how many times it ran there before."""


def draw(estimate: MemoryEstimate, path: str | Path, budget: int | None = None) -> None:
    """Write the memory of all tensors during a step to an image file: below by parts of the model, above beside
    `plain`. Each visit of a part of the model is as wide as any other, in both curves.
    """
    need("matplotlib", extra="demos")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(1, 2))
    visits, held = visits_of(estimate.step.trace.moments), estimate.held / _MIB
    order, names = list(visits), list(dict.fromkeys(part for part, _, _ in visits))
    xs, ys = _curve(visits, order, held)
    peak = max(ys)
    for axes in (above, below):
        axes.axhspan(0, held, color="0.85", label="held before the step")
        axes.axvline(sum(not is_backward for _, is_backward, _ in order), color="black", linestyle=":")
        axes.set_ylabel("MiB of tensors")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        if budget is not None and (axes is above or budget / _MIB < 1.15 * peak):
            axes.axhline(budget / _MIB, color="0.3", linestyle="--", label="budget")
    above.step(xs, ys, color=COLORS[0], label=f"engine {estimate.engine}")
    if "plain" in estimate.by_engine:
        plain = visits_of(estimate.by_engine["plain"].trace.moments)
        above.step(*_curve(plain, order, held), color=COLORS[3], label="engine plain")
    for visit, moments in visits.items():
        curve, top = _curve({visit: moments}, order, held)
        below.fill_between(curve, held, top, step="pre", color=COLORS[names.index(visit[0]) % 6], linewidth=0)
    below.plot(xs[ys.index(peak)], peak, "v", color="black")
    below.text(xs[ys.index(peak)], 1.03 * peak, f"peak: {peak:,.0f} MiB", ha="center")
    labels = [part.replace("features.", "") for part, _, _ in order]
    below.set_xticks([i + 0.5 for i in range(len(order))], labels, rotation=30, ha="right", fontsize="small")
    below.set(xlim=(0, len(order)), ylim=(0, 1.15 * peak))
    above.set(ylim=(0, None), title=f"A training step on {'×'.join(map(str, estimate.input_shape))}, by engine")
    below.set_title(f"Engine {estimate.engine}, part by part: the forward, and right of the dotted line the backward")
    above.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def draw_card(fits: Sequence[CardFit], path: str | Path, card: int | str, title: str) -> None:
    """Write an image file with the memory of a step against the batch, up to the largest batch that fits a card."""
    need("matplotlib", extra="demos")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for fit, color in zip((fit for fit in fits if not fit.refused), COLORS * len(fits), strict=False):
        batches = [min(fit.sizes), max(fit.largest_batch, 1)]
        label = f"{fit.engine}, {fit.precision}: {fit.largest_batch:,}"
        axes.plot(batches, [fit.sizes[each] / _GIB for each in batches], color=color, label=label)
        axes.plot(batches[1], fit.peak / _GIB, "o", color=color)
    size = parse_bytes("card", card)
    for bytes_, name, style in ((size, "the card", "-"), (usable(card), "left for training", "--")):
        axes.axhline(bytes_ / _GIB, color="0.3", linestyle=style)
        axes.text(0, bytes_ / _GIB, f" {name}, {format_bytes(bytes_)}", va="bottom", color="0.3", fontsize="small")
    axes.set(xlabel="images in a batch", ylabel="memory of a training step, GiB", title=title)
    axes.set(xlim=(0, None), ylim=(0, 1.1 * size / _GIB))
    axes.legend(title="engine, precision: largest batch", loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def visits_of(moments: Sequence[Moment]) -> dict[Visit, list[Moment]]:
    """The moments from one change of the part that runs to the next."""
    visits, before = dict[Visit, list[Moment]](), Counter[tuple[str, bool]]()
    for _, group in groupby(moments, key=lambda moment: (moment.part, moment.is_backward)):
        _, part, is_backward = (found := list(group))[0]
        visits[part, is_backward, before[part, is_backward]] = found
        before[part, is_backward] += 1
    return visits


def _curve(visits: dict[Visit, list[Moment]], order: list[Visit], held: float) -> tuple[list[float], list[float]]:
    """The MiB of all tensors at each moment of the visits, evenly spaced at their places in `order`."""
    xs, ys = list[float](), list[float]()
    for visit in filter(visits.__contains__, order):
        start, moments = order.index(visit), visits[visit]
        xs += [start, *(start + (i + 1) / len(moments) for i in range(len(moments)))]
        ys += [ys[-1] if ys else held, *(held + moment.bytes / _MIB for moment in moments)]
    return xs, ys
