"""Weights that runs of the demos saved in the repository's checkpoints/, by name; no network is needed."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .config import ModelConfig

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
"""The directory is next to the package in a clone, and so in an editable installation. Other installations lack it."""


class TrainedWeights(NamedTuple):
    """The weights of a run: the variant of the zoo, the run's directory in checkpoints/, and the sha256 of model.pt."""

    model: str
    directory: str
    sha256: str

    @property
    def folder(self) -> Path:
        return CHECKPOINTS / self.directory

    @property
    def model_arguments(self) -> dict[str, Any]:
        """The arguments of the model, unless the caller overrides them."""
        return {"num_classes": len(self.classes), "in_channels": self._config().channels}

    @property
    def classes(self) -> tuple[str, ...]:
        return self._config().classes

    def transforms(self) -> Callable[[Any], Tensor]:
        return self._config().transforms()

    def source(self) -> Path:
        """The file of the weights, after a check of its sha256."""
        path = self.folder / "model.pt"
        found = hashlib.sha256(self._read(path)).hexdigest()
        if found != self.sha256:
            raise ValueError(
                f"{path} has the sha256 {found}, but needs {self.sha256}: restore it from the repository, as by "
                f"git checkout -- checkpoints/{self.directory}"
            )
        return path

    def _config(self) -> ModelConfig:
        path = self.folder / "config.json"
        return ModelConfig.parse(path, self._read(path))

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as exc:
            raise ValueError(
                f"{path} cannot be read ({exc.strerror}), but these weights need it, and only a clone of the "
                f"repository has it: clone it and install with pip install -e, or copy checkpoints/{self.directory} "
                "there"
            ) from exc


TRAINED = {
    "cifar10": TrainedWeights(
        "densenet_bc_100_12",
        "cifar10_jpeg_densenet_bc_100_12",
        "88606bc393a174e13331e36ffa3dc5f4da6067156dbeaa6c763bc0c06a5c1743",
    ),
}
"""The weights by the name that `weights=` and the demos' `--weights` take."""


def find_checkpoint(source: str) -> Path:
    """The file of the weights named `source`, after a check of its sha256, or else `source` as a path."""
    return TRAINED[source].source() if source in TRAINED else Path(source)
