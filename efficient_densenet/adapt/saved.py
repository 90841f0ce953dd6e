"""Measure in a trial what a forward saves for the backward."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from .._torch_private import memory_key
from .sample import IMAGES, dimensions
from .trial import MAIN_MODES, Forward, Trial

_SMALLEST, _STEP = 4, 2
"""The smallest size of images whose saved values are counted, and the next: even, to be halved once."""


def saved_values_per_pixel(trial: Trial, forward: Forward) -> int:
    """The values per pixel that training by `forward` saves for backward, in the dtype of the trial.

    They are the leading coefficient of a polynomial in the size of the images: what is padded, and what does not
    depend on the size (parameters, statistics), is in the others. Differences of values at equal steps show it. Zero
    means that `forward` takes no such sizes.
    """
    dims, saved = dimensions(trial.module), []
    smallest = max(_SMALLEST, trial.sample.size)
    for size in range(smallest, smallest + _STEP * (dims + 1), _STEP):
        with trial.prepared(MAIN_MODES[1]):
            x = trial.input(MAIN_MODES[1], trial.sample._replace(size=size))
            try:
                saved.append(_saved_values(forward, x))
            except Exception:
                return 0
    for _ in range(dims):
        saved = [after - before for before, after in pairwise(saved)]
    return round(saved[0] / (math.factorial(dims) * _STEP**dims * IMAGES))


def _saved_values(forward: Forward, x: Tensor) -> float:
    """The values that `forward` saves for backward. A storage that holds several tensors counts once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[memory_key(tensor)] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(x)
    return sum(storage.nbytes() for storage in storages.values()) / x.itemsize
