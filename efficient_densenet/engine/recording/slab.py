"""The slab of a run: one memory for temporaries, in which each has a place."""

import itertools
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from .recorder import Memory

ALIGNMENT = 512
"""In bytes, as PyTorch's allocator for CUDA aligns."""

SLACK, SMALL_SLACK = 1.01, 1 << 20
"""How much more a run on a GPU may hold with a slab than without: a ratio, and these bytes."""


class Slab(NamedTuple):
    """The slab exists as long as the run. `offsets` are the places of temporaries by their numbers, and `outputs` the
    memories of outputs that are allocated with it."""

    offsets: Mapping[int, int] = {}
    nbytes: int = 0
    outputs: Set[int] = frozenset()

    def peak(self, memories: Mapping[int, Memory], num_events: int) -> int:
        """The most that a run holds with this slab, of the memories that it allocates."""
        held = [(0, num_events, self.nbytes)] if self.offsets else []
        for number, each in memories.items():
            if number not in self.offsets:
                held.append((0 if number in self.outputs else each.first, each.last, each.nbytes))
        return max(_live(held, num_events))


NO_SLAB = Slab()


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
