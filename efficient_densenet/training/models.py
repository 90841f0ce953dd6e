"""The model of a run, from the few words that describe it; the same words are kept with its weights."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..models.densenet import DenseNet
from ..models.zoo import VARIANTS, create_model
from . import files
from .data.augment import Preparation
from .options import Options, layers_in_blocks

WEIGHTS, DESCRIPTION = "model.pt", "config.json"


@dataclass(frozen=True)
class Description:
    """What it takes to build a model again and to prepare pictures for it."""

    model: str | None
    depth: int | None
    growth_rate: int | None
    drop_rate: float
    channels: int
    image_size: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.model or f"DenseNet-BC-{self.depth}-{self.growth_rate}"

    def build(self, engine: bool | str = True) -> DenseNet:
        efficient = True if engine == "best" else engine
        shared = {
            "drop_rate": self.drop_rate,
            "num_classes": len(self.classes),
            "in_channels": self.channels,
            "efficient": efficient,
        }
        if self.model is not None:
            return create_model(self.model, **shared)
        blocks, k = layers_in_blocks(self.depth), self.growth_rate
        return DenseNet(k, blocks, num_init_features=2 * k, **shared)


def describe(
    options: Options, channels: int, classes: Sequence[str], preparation: Preparation, size: int
) -> Description:
    return Description(
        options.model,
        options.depth,
        options.growth_rate,
        options.drop_rate,
        channels,
        size,
        tuple(classes),
        preparation.mean,
        preparation.std,
    )


def usual_image_size(model: str | None) -> int:
    return 224 if model in VARIANTS and not VARIANTS[model]["small_inputs"] else 32


def read_config(folder: Path) -> dict[str, Any]:
    config = files.read_json(folder / DESCRIPTION)
    if not isinstance(config, dict) or not {"options", "model", "data"} <= config.keys():
        raise ValueError(f"{folder / DESCRIPTION} does not describe a run of these demos: give the folder of one")
    return config


def load_model(path: Path) -> tuple[DenseNet, Description]:
    """The trained model in a run's folder, or in a file of weights that lies in one."""
    weights, folder = (path / WEIGHTS, path) if path.is_dir() else (path, path.parent)
    if not weights.exists():
        raise ValueError(f"{weights} does not exist: give the folder of a run, or a file of weights in one")
    description = _described(read_config(folder)["model"], folder / DESCRIPTION)
    model = description.build()
    load_into(model, files.read_tensors(weights), weights)
    return model.eval(), description


def _described(words: Any, path: Path) -> Description:
    names = {field.name for field in fields(Description)}
    words = words if isinstance(words, dict) else {}
    if words.keys() != names:
        differing = sorted(names.symmetric_difference(words))
        raise ValueError(
            f"{path} does not describe a model of these demos ({', '.join(differing[:3])}): give the folder of a run"
        )
    return Description(**{name: tuple(value) if isinstance(value, list) else value for name, value in words.items()})


def load_into(model: DenseNet, weights: Any, path: Path) -> None:
    expected = model.state_dict()
    fits = isinstance(weights, dict) and weights.keys() == expected.keys()
    if not fits or any(weights[k].shape != expected[k].shape for k in expected):
        raise ValueError(
            f"{path} holds other tensors than this model has, and was left as it is: give the folder that it was "
            "trained in, with its config.json"
        )
    model.load_state_dict(weights)


def as_config(description: Description) -> dict[str, Any]:
    return asdict(description)


def count(model: torch.nn.Module) -> tuple[int, int]:
    """The number of the parameters, and their bytes."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
