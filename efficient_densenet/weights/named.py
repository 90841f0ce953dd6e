"""What `weights=` takes: a file, or the name of weights of this package's training runs, or torchvision's weights."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .._extras import need
from .config import ModelConfig
from .load import model_arguments

PUBLISHED = ("densenet121", "densenet161", "densenet169", "densenet201")
"""The variants with weights in torchvision."""
NAMES = ("DEFAULT", "IMAGENET1K_V1")
"""torchvision's names for the weights of each variant."""

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
"""The directory is next to the package in a clone, and so in an editable installation. Other installations lack it."""


class TrainedWeights(NamedTuple):
    """The weights of a run: the variant of the zoo, and the run's directory in checkpoints/."""

    model: str
    directory: str

    @property
    def folder(self) -> Path:
        return CHECKPOINTS / self.directory


TRAINED = {"cifar10_jpeg": TrainedWeights("densenet_bc_100_12", "cifar10_jpeg_densenet_bc_100_12")}
"""The weights by the name that `weights=` and the demos' `--weights` take."""


def find_checkpoint(source: str) -> Path:
    """The file of the weights named `source`, or else `source` as a path."""
    if source not in TRAINED:
        return Path(source)
    path = TRAINED[source].folder / "model.pt"
    if not path.is_file():
        raise ValueError(
            f"{path} is no file, but these weights need it, and only a clone of the repository has it: clone it and "
            f"install with pip install -e, or copy checkpoints/{path.parent.name} there"
        )
    return path


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


class PublishedWeights(NamedTuple):
    """A member of torchvision's `WeightsEnum`."""

    entry: Any

    @property
    def model_arguments(self) -> dict[str, Any]:
        return {"num_classes": len(self.classes), "in_channels": 3}

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.entry.meta["categories"])

    def transforms(self) -> Callable[[Any], Tensor]:
        return self.entry.transforms()

    def source(self) -> Mapping[str, Tensor]:
        """The state dict of the weights, downloaded unless torch.hub's cache has it."""
        try:
            return self.entry.get_state_dict(progress=True, check_hash=True, weights_only=True)
        except (OSError, RuntimeError) as exc:
            reason = str(getattr(exc, "reason", exc)).splitlines()[0]
            raise OSError(
                f"the weights {self.entry} could not be downloaded from {self.entry.url} ({reason}): connect to the "
                "network, or pass a file to load_weights, or as --weights to the demo"
            ) from None


def find_weights(name: str, weights: Any) -> FileWeights | PublishedWeights:
    """Find the weights for the variant `name` of the zoo; raise ValueError for a wrong name, and download nothing."""
    if isinstance(weights, os.PathLike):
        return FileWeights(Path(weights))
    trained = TRAINED.get(weights) if isinstance(weights, str) else None
    names_file = isinstance(weights, str) and (os.sep in weights or weights.endswith((".pt", ".pth", ".safetensors")))
    if trained is None and (names_file or os.path.isfile(str(weights))):
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


def find_published(name: str, weights: Any) -> PublishedWeights:
    """The weights for the variant `name`, one of `PUBLISHED`.

    `weights` is a `WeightsEnum` member, or its name with or without the name of its class.
    """
    enum = need("torchvision", extra="weights").models.get_model_weights(name)
    if isinstance(weights, enum):
        return PublishedWeights(weights)
    member = str(weights).removeprefix(f"{enum.__name__}.")
    if isinstance(weights, str) and member in enum.__members__:
        return PublishedWeights(enum[member])
    names = ", ".join(map(repr, enum.__members__))
    raise ValueError(f"weights is {weights!r}, but must be one of {names} for {name}, or a file")
