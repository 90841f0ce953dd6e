"""Verify in a trial that a forward computes the same results as a block's own forward; measure what it saves."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..memory.peaks import saved_bytes
from .errors import NotRunError, VerificationError
from .sample import IMAGES, dimensions
from .trial import MAIN_MODES, Forward, Result, Trial

Results = Sequence[Result]
"""The results of a block's own forward in each mode."""


def describe_difference(block_results: Results, trial: Trial, forward: Forward) -> str | None:
    """The difference between the block and the dense block that `forward` computes, or None if they agree.

    Both must also run the same operations. An operation may have no effect on a trial's input, such as clamping to a
    range; it still shows that `forward` does not describe the block.
    """
    try:
        actual_results = trial.run(forward, [each.mode for each in block_results], is_authors=False)
        for expected, actual in zip(block_results, actual_results, strict=True):
            difference = _difference(actual, expected)
            if difference is not None:
                return difference
    except NotRunError as failure:
        return (
            "has layers that cannot run as norm, activation and convolution in turn on a growing concatenation "
            f"({failure.error})"
        )
    except VerificationError as failure:
        return f"has layers that {failure}, as norm, activation and convolution in turn on a growing concatenation"
    return None


def _difference(actual: Result, expected: Result) -> str | None:
    """The difference between the result of a dense block and the result of the author's forward, or None."""
    agree = [
        _agree(actual.values, expected.values),
        _agree(actual.gradients, expected.gradients),
        _agree(actual.states, expected.states),
    ]
    operations = _operations_beyond(expected, actual)
    if all(agree) and not operations:
        return None
    if not agree[0] and _is_tensor(actual.values[0]) and _is_tensor(expected.values[0]):
        shape, dense_shape = (tuple(result.values[0].shape[1:]) for result in (expected, actual))
        if shape != dense_shape:
            return f"returns {shape} for a trial input, where a dense block with these layers returns {dense_shape}"
    kinds = "values", "gradients", "random numbers or running statistics"
    what = next((kind for kind, same in zip(kinds, agree, strict=True) if not same), None)
    found = f"has other {what} in" if what else f"runs other operations ({', '.join(operations)}) in"
    return (
        f"{found} {expected.mode.name} than the dense block that its layers suggest: norm, activation, convolution "
        "(and dropout) on a growing concatenation"
    )


def _operations_beyond(block: Result, parts: Result) -> list[str]:
    """The names of the operations that ran in only one of two runs, or more often in one."""
    names = {*(block.operations - parts.operations), *(parts.operations - block.operations)}
    return sorted({name.partition(" ")[0] for name in names})


def _agree(actual: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(actual) == len(expected) and all(map(_values_agree, actual, expected))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _values_agree(actual: Any, expected: Any) -> bool:
    """Whether two tensors are equal up to a tolerance relative to the largest value, or two other values are equal."""
    if not (_is_tensor(actual) and _is_tensor(expected)):
        return actual is expected or (type(actual) is type(expected) and actual == expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not actual.is_floating_point() or torch.equal(actual, expected):
        return torch.equal(actual, expected)
    tolerance = {torch.float64: 1e-8, torch.float32: 1e-3}.get(actual.dtype, 3e-2)
    difference = (actual.double() - expected.double()).abs().max()
    return bool(difference <= tolerance * expected.double().abs().max())


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
                saved.append(saved_bytes(lambda x=x: forward(x)) / x.itemsize)
            except Exception:
                return 0
    for _ in range(dims):
        saved = [after - before for before, after in pairwise(saved)]
    return round(saved[0] / (math.factorial(dims) * _STEP**dims * IMAGES))


_SMALLEST, _STEP = 4, 2
"""The smallest size of images whose saved values are counted, and the next: even, to be halved once."""
