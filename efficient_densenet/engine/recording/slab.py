"""The places of temporaries in one memory, and the part of a run in which it exists."""

import itertools
from collections.abc import Collection, Mapping
from typing import Protocol

ALIGNMENT = 512
"""In bytes, as PyTorch's allocator for CUDA aligns."""

PART_OF_PEAK = 64
"""A result of an operation is large if it takes at least 1/64 of the memory at the run's peak."""


class Lifetime(Protocol):
    """The size of a temporary, and the numbers of the first and the last event that use it."""

    nbytes: int
    first: int
    last: int


def plan(temporaries: Mapping[int, Lifetime]) -> tuple[dict[int, int], int]:
    """The offset of each temporary by its number, and the size of the slab.

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


def window(memories: Collection[Lifetime], results: Collection[Lifetime], num_events: int) -> range:
    """The events around the peak of `memories` between which no large one of `results` begins or ends.

    An operation allocates its result itself, and a slab that exists then keeps memory that the result could take.
    """
    changes = [0] * (num_events + 2)  # outputs live after the last event
    for each in memories:
        changes[each.first] += each.nbytes
        changes[each.last + 1] -= each.nbytes
    live = list(itertools.accumulate(changes))
    peak = max(range(num_events), key=live.__getitem__, default=0)
    large = [each for each in results if each.nbytes * PART_OF_PEAK >= live[peak]]
    start = max((each.last + 1 for each in large if each.last < peak), default=0)
    return range(start, min((each.first for each in large if each.first > peak), default=num_events))


def within(events: range, memory: Lifetime) -> bool:
    """Whether no other events use the memory."""
    return memory.first in events and memory.last in events


def _aligned(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
