"""Weights by the name that `weights=` takes: weights of this package's training runs, and torchvision's weights."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .published import PUBLISHED, PublishedWeights, find_published
from .trained import TRAINED, TrainedWeights


def weights_transforms(name: str, weights: Any = "DEFAULT") -> Callable[[Any], Tensor]:
    """Return the transforms that these weights are evaluated with, from an image to a normalized tensor."""
    return find_weights(name, weights).transforms()


def weights_classes(name: str, weights: Any = "DEFAULT") -> tuple[str, ...]:
    """Return the names of the classes that these weights tell apart, in the order of the model's outputs."""
    return find_weights(name, weights).classes


def find_weights(name: str, weights: Any) -> TrainedWeights | PublishedWeights:
    """Find the weights for the variant `name` of the zoo; raise ValueError for a wrong name, and download nothing."""
    trained = TRAINED.get(weights) if isinstance(weights, str) else None
    if trained is not None:
        if trained.model != name:
            raise ValueError(f"the weights {weights!r} are for {trained.model}, and not for {name}: build that model")
        return trained
    ours = [each for each, entry in TRAINED.items() if entry.model == name]
    if ours and name not in PUBLISHED:
        raise ValueError(f"weights is {weights!r}, but must be {' or '.join(map(repr, ours))} for {name}")
    if name not in PUBLISHED:
        raise ValueError(f"torchvision has no weights for {name!r}, but for {', '.join(PUBLISHED)}: leave weights out")
    return find_published(name, weights)
