"""The places of temporaries in one memory."""

from collections.abc import Mapping
from typing import Protocol

ALIGNMENT = 512
"""In bytes, as PyTorch's allocator for CUDA aligns."""


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


def _aligned(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
