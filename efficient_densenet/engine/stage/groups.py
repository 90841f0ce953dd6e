"""Layer groups: consecutive layers of a large stage, whose gradients are released together."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .spec import StageSpec

LAYER_GROUP_BYTES = 1 << 21
"""How large the parameters of a layer group may be, if it has more than one layer."""


class LayerGroup(NamedTuple):
    """Consecutive layers of a stage whose gradients are released together, and their slice of the stage's tensors."""

    layers: range
    tensors: slice


def layer_groups(spec: StageSpec, parameters: Sequence[Tensor | None]) -> list[LayerGroup]:
    """From the first layers to the last; the last group has the consumer too."""
    firsts, size = [0], 0
    for i, tensors in enumerate(map(spec.layer_tensors, range(len(spec.layers)))):
        own = sum(tensor.nbytes for tensor in parameters[tensors] if tensor is not None)
        if i > firsts[-1] and size + own > LAYER_GROUP_BYTES:
            firsts.append(i)
            size = 0
        size += own
    starts = [0, *(spec.layer_tensors(first).start for first in firsts[1:])]
    nexts, stops = [*firsts[1:], len(spec.layers)], [*starts[1:], len(parameters)]
    return list(map(LayerGroup, map(range, firsts, nexts), map(slice, starts, stops)))
