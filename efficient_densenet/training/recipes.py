"""Learning rates as functions of how far a run has come: there is no schedule to save, only a position."""

import math
from collections.abc import Callable


def step(lr: float, epoch: int, n_epochs: int, within: float) -> float:
    """The papers': divided by 10 after half and after three quarters of the epochs."""
    done = epoch - 1
    return lr * 0.1 ** ((done >= n_epochs * 0.5) + (done >= n_epochs * 0.75))


def one_cycle(lr: float, epoch: int, n_epochs: int, within: float) -> float:
    """Up from a 25th in the first 30%, then down to nothing, both along a cosine."""
    done = (epoch - 1 + within) / n_epochs
    low, high, part = (lr / 25, lr, done / 0.3) if done < 0.3 else (lr, 0.0, (done - 0.3) / 0.7)
    return low + (high - low) * (1 - math.cos(math.pi * part)) / 2


RECIPES: dict[str, Callable[[float, int, int, float], float]] = {"step": step, "one_cycle": one_cycle}
"""By name: (highest lr, epoch from 1, number of epochs, share of this epoch done) → lr."""
