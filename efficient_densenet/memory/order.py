"""The order in which a budget takes what is recomputed: by what it saves for each byte that the step's peak grows."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from .step import StepMemory

MULTIPLICATIONS_A_NUMBER = 64
"""A processor multiplies about as often in the time in which it writes and reads a number: what takes fewer
multiplications than that is faster to recompute. (Measured on CPUs, by `benchmarks/budgets.py`.)"""


class Recomputed(NamedTuple):
    """A layer whose bottleneck is recomputed: its block's name, its position there, the part of the model that has it,
    the bottleneck's bytes, and the multiplications that are spared if it is saved."""

    block: str
    position: int
    part: str
    bytes: int
    work: int


def merged(found: Iterable[Recomputed]) -> list[Recomputed]:
    """One for each layer; a block may run several times in a step."""
    by_layer = dict[tuple[str, int], Recomputed]()
    for each in found:
        before = by_layer.get((each.block, each.position))
        if before is not None:
            each = each._replace(bytes=each.bytes + before.bytes, work=each.work + before.work)
        by_layer[each.block, each.position] = each
    return list(by_layer.values())


def kept_layers(taken: Iterable[Recomputed]) -> dict[str, tuple[int, ...]]:
    """The positions of the layers in each block, in order."""
    kept = dict[str, tuple[int, ...]]()
    for each in taken:
        kept[each.block] = tuple(sorted((*kept.get(each.block, ()), each.position)))
    return kept


def in_order(layers: list[Recomputed], step: StepMemory) -> Iterator[tuple[Recomputed, int]]:
    """The layers in the order in which they are taken, and the step's peak with all that are taken until then."""
    parts = list(dict.fromkeys(layer.part for layer in layers))
    candidates = {
        part: sorted((each for each in layers if each.part == part), key=lambda each: each.work / each.bytes)
        for part in parts
    }
    peaks, kept = _peaks(step, parts), dict.fromkeys(parts, 0)

    def peak_with(part: str, size: int) -> int:
        return max(base + sum(kept[each] + (size if each == part else 0) for each in alive) for base, alive in peaks)

    while any(candidates.values()):
        before = peak_with("", 0)

        def saved_per_byte(part: str, before: int = before) -> tuple[float, float]:
            layer = candidates[part][-1]
            growth = peak_with(part, layer.bytes) - before
            return (float("inf") if growth == 0 else layer.work / growth), layer.work / layer.bytes

        best = max((part for part in parts if candidates[part]), key=saved_per_byte)
        layer = candidates[best].pop()
        kept[best] += layer.bytes
        yield layer, peak_with("", 0)


def _peaks(step: StepMemory, parts: list[str]) -> list[tuple[int, frozenset[str]]]:
    """The peaks of the step's phases, and the parts whose saved bottlenecks are alive in each: those from the start of
    a part's forward to the end of its backward."""
    moments = step.trace.moments
    first, last = dict[str, int](), dict[str, int]()
    for i, moment in enumerate(moments):
        first.setdefault(moment.part, i)
        last[moment.part] = i
    ends = sorted({0, len(moments), *(first[part] for part in parts), *(last[part] + 1 for part in parts)})
    return [
        (
            max(moment.bytes for moment in moments[start:stop]),
            frozenset(part for part in parts if first[part] <= start <= last[part]),
        )
        for start, stop in pairwise(ends)
    ]
