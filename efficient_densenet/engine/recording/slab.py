"""The slab of a run: one memory for temporaries, in which each has a place."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from .recorder import Memory

ALIGNMENT = 512
"""In bytes, as PyTorch's allocator for CUDA aligns."""

LARGE = 1 / 64
"""The fraction of the memory at the run's peak from which on a result of an operation is large."""

MOST = 1.25
"""The most that a run may hold with a slab, relative to what it holds without one at its peak."""

SLACK, SMALL_SLACK = 1.01, 1 << 20
"""How much more a run may hold with a slab than with the best: a ratio, and in a small run these bytes."""


class Slab(NamedTuple):
    """The slab exists during `events`, an empty range if there is none. `offsets` are the places of temporaries by
    their numbers, and `outputs` the memories of outputs that are allocated with it."""

    events: range
    offsets: Mapping[int, int] = {}
    nbytes: int = 0
    outputs: Set[int] = frozenset()

    def peak(self, memories: Mapping[int, Memory], num_events: int) -> int:
        """The most that a run holds with this slab, of the memories that it allocates."""
        held = [(self.events.start, self.events.stop - 1, self.nbytes)]
        for number, each in memories.items():
            if number not in self.offsets:
                held.append((self.events.start if number in self.outputs else each.first, each.last, each.nbytes))
        return max(_live(held, num_events))


NO_SLAB = Slab(range(0))


def choose(memories: Mapping[int, Memory], allocated: Set[int], outputs: Set[int], num_events: int) -> Slab:
    """The slab of most temporaries, of those with which the run holds about as little as it can.

    `memories` are those that the run allocates: by itself, or as results of operations if they are not in `allocated`.
    """
    peak = NO_SLAB.peak(memories, num_events)
    found = []
    results = [each for n, each in memories.items() if n not in allocated and each.nbytes >= LARGE * peak]
    for slab in _candidates(memories, results, allocated, outputs, num_events):
        held = slab.peak(memories, num_events)
        if held <= MOST * peak + SMALL_SLACK:
            found.append((held, slab))
    least = min((held for held, _ in found), default=0)
    usable = [slab for held, slab in found if held <= SLACK * least + SMALL_SLACK]
    return max(usable, key=lambda slab: (len(slab.offsets), len(slab.outputs)), default=NO_SLAB)


def _candidates(
    memories: Mapping[int, Memory],
    results: Iterable[Memory],
    allocated: Set[int],
    outputs: Set[int],
    num_events: int,
) -> Iterator[Slab]:
    """Slabs of the temporaries within the whole run, and within each part of it between large `results` of operations.

    An operation allocates its result itself, and a slab that exists then keeps memory that the result could take.
    """
    cuts = sorted({0, num_events, *(each.first for each in results), *(each.last + 1 for each in results)})
    for start, stop in {(0, num_events), *itertools.pairwise(cuts)}:
        inside = {
            number: memories[number]
            for number in allocated - outputs
            if start <= memories[number].first and memories[number].last < stop
        }
        if inside:
            first = min(each.first for each in inside.values())
            events = range(first, max(each.last for each in inside.values()) + 1)
            offsets, nbytes = plan(inside)
            yield Slab(events, offsets, nbytes)
            yield Slab(events, offsets, nbytes, {n for n in outputs & allocated if memories[n].first in events})


def _live(held: Iterable[tuple[int, int, int]], num_events: int) -> list[int]:
    """The bytes that are held at each event, of memories that are held from one event to another."""
    changes = [0] * (num_events + 2)  # outputs live after the last event
    for first, last, nbytes in held:
        changes[first] += _aligned(nbytes)
        changes[last + 1] -= _aligned(nbytes)
    return list(itertools.accumulate(changes))


def plan(temporaries: Mapping[int, Memory]) -> tuple[dict[int, int], int]:
    """The offset of each temporary by its number, and the size of the slab that they need.

    Each lies at the lowest place that is free while it lives; the largest are placed first.
    """
    offsets: dict[int, int] = {}
    total = 0
    for number, each in sorted(temporaries.items(), key=lambda item: -item[1].nbytes):
        offset = 0
        for start, other in sorted((start, other) for other, start in offsets.items()):
            lives_too = temporaries[other].first <= each.last and each.first <= temporaries[other].last
            if lives_too and start < offset + _aligned(each.nbytes):
                offset = max(offset, start + _aligned(temporaries[other].nbytes))
        offsets[number] = offset
        total = max(total, offset + _aligned(each.nbytes))
    return offsets, total


def _aligned(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
