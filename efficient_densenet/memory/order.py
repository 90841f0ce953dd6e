"""The order in which a budget takes what is recomputed: by what it saves for each byte that the step's peak grows."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from .step import StepMemory


class Recomputed(NamedTuple):
    """A layer whose bottleneck is recomputed: its block's name, its position there, the part of the model that has it,
    the bottleneck's bytes, and the multiplications that are spared if it is saved."""

    block: str
    position: int
    part: str
    bytes: int
    work: int


def kept_layers(taken: Iterable[Recomputed]) -> dict[str, tuple[int, ...]]:
    """The positions of the layers in each block, in order."""
    kept = dict[str, tuple[int, ...]]()
    for each in taken:
        kept[each.block] = tuple(sorted((*kept.get(each.block, ()), each.position)))
    return kept


def in_order(layers: Iterable[Recomputed], step: StepMemory) -> Iterator[tuple[Recomputed, int]]:
    """The layers in the order in which they are taken, and the step's peak with all that are taken until then."""
    rest, kept = list(layers), Counter[str]()
    phases = _phases(step, list(dict.fromkeys(layer.part for layer in rest)))

    def peak_with(part: str, size: int) -> int:
        return max(base + sum(kept[each] + size * (each == part) for each in alive) for base, alive in phases)

    def saved_per_byte(layer: Recomputed) -> tuple[float, float]:
        growth = peak_with(layer.part, layer.bytes) - peak
        return (float("inf") if growth == 0 else layer.work / growth), layer.work / layer.bytes

    peak = step.tensor_peak
    while rest:
        best = max(rest, key=saved_per_byte)
        rest.remove(best)
        kept[best.part] += best.bytes
        peak = peak_with("", 0)
        yield best, peak


def _phases(step: StepMemory, parts: list[str]) -> list[tuple[int, frozenset[str]]]:
    """The peaks of the step's phases, and the parts whose saved bottlenecks are alive in each: those from the start of
    a part's forward to the end of its backward."""
    moments = step.trace.moments
    # A part that is in another's stage has no moments.
    first, last = dict.fromkeys(parts, 0), dict.fromkeys(parts, len(moments) - 1)
    first |= {moment.part: i for i, moment in reversed([*enumerate(moments)])}
    last |= {moment.part: i for i, moment in enumerate(moments)}
    ends = sorted({0, len(moments), *(first[part] for part in parts), *(last[part] + 1 for part in parts)})
    return [
        (
            max(moment.bytes for moment in moments[start:stop]),
            frozenset(part for part in parts if first[part] <= start <= last[part]),
        )
        for start, stop in pairwise(ends)
    ]
