"""What `weights=` takes: a file, or the name of weights of this package's training runs, or torchvision's weights."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .config import ModelConfig
from .load import model_arguments
from .published import PUBLISHED, PublishedWeights, find_published
from .trained import TRAINED, find_checkpoint


def weights_transforms(name: str, weights: Any = "DEFAULT") -> Callable[[Any], Tensor]:
    """Return the transforms that these weights are evaluated with, from an image to a normalized tensor."""
    return find_weights(name, weights).transforms()


def weights_classes(name: str, weights: Any = "DEFAULT") -> tuple[str, ...]:
    """Return the names of the classes that these weights tell apart, in the order of the model's outputs."""
    return find_weights(name, weights).classes


class FileWeights(NamedTuple):
    """A file, as `load_weights` reads it. A run of the demos writes classes and transforms into a config.json beside
    it."""

    path: Path

    @property
    def model_arguments(self) -> dict[str, int]:
        return model_arguments(self.path)

    @property
    def classes(self) -> tuple[str, ...]:
        return ModelConfig.beside(self.path).classes

    def transforms(self) -> Callable[[Any], Tensor]:
        return ModelConfig.beside(self.path).transforms()

    def source(self) -> Path:
        return self.path


def find_weights(name: str, weights: Any) -> FileWeights | PublishedWeights:
    """Find the weights for the variant `name` of the zoo; raise ValueError for a wrong name, and download nothing."""
    if isinstance(weights, os.PathLike):
        return FileWeights(Path(weights))
    trained = TRAINED.get(weights) if isinstance(weights, str) else None
    if trained is None and isinstance(weights, str) and (os.sep in weights or os.path.isfile(weights)):
        return FileWeights(Path(weights))
    if trained is not None:
        if trained.model != name:
            raise ValueError(f"the weights {weights!r} are for {trained.model}, and not for {name}: build that model")
        return FileWeights(find_checkpoint(weights))
    ours = [each for each, entry in TRAINED.items() if entry.model == name]
    if ours and name not in PUBLISHED:
        raise ValueError(f"weights is {weights!r}, but must be {' or '.join(map(repr, ours))} for {name}")
    if name not in PUBLISHED:
        raise ValueError(f"torchvision has no weights for {name!r}, but for {', '.join(PUBLISHED)}: leave weights out")
    return find_published(name, weights)
