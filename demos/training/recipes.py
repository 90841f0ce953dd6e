"""Learning rate schedules as functions of the progress of a run: a resumed run needs no state of a scheduler."""

import math
from collections.abc import Callable


def step(lr: float, epoch: int, n_epochs: int, epoch_fraction: float) -> float:
    """The schedule of the papers: divided by 10 after half and after three quarters of the epochs."""
    done = epoch - 1
    return lr * 0.1 ** ((done >= n_epochs * 0.5) + (done >= n_epochs * 0.75))


def one_cycle(lr: float, epoch: int, n_epochs: int, epoch_fraction: float) -> float:
    """Cosine warm-up from lr / 25 in the first 30% of the run, then cosine decay to zero."""
    done = (epoch - 1 + epoch_fraction) / n_epochs
    low, high, part = (lr / 25, lr, done / 0.3) if done < 0.3 else (lr, 0.0, (done - 0.3) / 0.7)
    return low + (high - low) * (1 - math.cos(math.pi * part)) / 2


RECIPES: dict[str, Callable[[float, int, int, float], float]] = {"step": step, "one_cycle": one_cycle}
"""By name: (highest learning rate, epoch from 1, number of epochs, fraction of the epoch done) → learning rate."""
