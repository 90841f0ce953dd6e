"""Weights that runs of the demos saved in the repository's checkpoints/, by name; no network is needed."""

from pathlib import Path
from typing import NamedTuple

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
