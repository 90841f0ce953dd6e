"""The model of a run, rebuilt from its config, and its weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from efficient_densenet._tensors import compute_dtype
from efficient_densenet.engine.choose import describe_plan
from efficient_densenet.models.densenet import DenseNet
from efficient_densenet.models.layers import DenseBlock
from efficient_densenet.models.zoo import VARIANTS, create_model

from . import files, run_format
from .data import Dataset
from .data.augment import Transform
from .data.images import digest
from .options import Options, block_config_for
from .schema import check_file, tensors_like
from .sharding import load_model_state

WEIGHTS, CONFIG = "model.pt", "config.json"


@dataclass(frozen=True)
class ModelConfig:
    """What building a trained model again needs, and preparing images for it. config.json has these names as keys."""

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

    def build(self, engine: bool | str = True, keep_bottleneck: bool = False) -> DenseNet:
        arguments: dict[str, Any] = {
            "drop_rate": self.drop_rate,
            "num_classes": len(self.classes),
            "in_channels": self.channels,
            "efficient": True if engine == "best" else engine,
            "keep_bottleneck": keep_bottleneck,
        }
        if self.model is not None:
            return create_model(self.model, **arguments)
        if self.depth is None or self.growth_rate is None:
            raise ValueError(f"found depth {self.depth} and growth rate {self.growth_rate}, but a model needs both")
        block_config = block_config_for(self.depth)
        return DenseNet(self.growth_rate, block_config, num_init_features=2 * self.growth_rate, **arguments)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def config_for(options: Options, dataset: Dataset, transform: Transform) -> ModelConfig:
    return ModelConfig(
        options.model,
        options.depth,
        options.growth_rate,
        options.drop_rate,
        dataset.channels,
        dataset.image_size,
        tuple(dataset.classes),
        transform.mean,
        transform.std,
    )


def default_image_size(model: str | None) -> int:
    return 224 if model in VARIANTS and not VARIANTS[model]["small_inputs"] else 32


def write_config(folder: Path, content: Mapping[str, Any]) -> None:
    """Write config.json, with its checksum as the first line, which whoever edits the file can take out."""
    files.write_atomic(folder / CONFIG, files.to_json({"checksum": _checksum(content), **content}))


def read_config(folder: Path) -> dict[str, Any]:
    """The checked content of config.json."""
    path = folder / CONFIG
    content = files.load_json(path)
    run_format.check_config(path, content)
    needed = content.pop("checksum", None)  # earlier versions wrote none
    found = _checksum(content)
    if needed not in (None, found):
        raise ValueError(
            f"{path}: its content has the checksum {found}, but was written with {needed}, so it is damaged or edited: "
            'restore it from a copy, or, if the change is meant, remove the line "checksum"'
        )
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return digest([json.dumps(content, sort_keys=True).encode()])


def load_model(path: Path) -> tuple[DenseNet, ModelConfig]:
    """The trained model, in eval mode, of a run's folder or of a file of weights in one."""
    weights, folder = (path / WEIGHTS, path) if path.is_dir() else (path, path.parent)
    if not weights.exists():
        raise ValueError(f"{weights} does not exist: give the folder of a run, or a file of weights in one")
    entries = read_config(folder)["model"]
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in entries.items()}
    config = ModelConfig(**values)
    content = files.load_torch(weights)
    with torch.device("meta"):
        expected = config.build()
    check_weights(expected, content, weights)
    model = config.build()
    model.load_state_dict(content)
    return model.eval(), config


def load_weights(model: nn.Module, weights: Path) -> None:
    content = files.load_torch(weights)
    check_weights(model, content, weights)
    load_model_state(model, content)


def check_weights(model: nn.Module, content: Any, path: Path) -> None:
    """Raise unless `content`, of the file `path`, is a state dict of `model`."""
    check_file(path, content, tensors_like(model.state_dict()))


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of parameters, and their bytes."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)


def describe_classes(classes: tuple[str, ...]) -> str:
    return f"{len(classes)} classes ({', '.join(classes[:3])}{', …' if len(classes) > 3 else ''})"


def describe_engines(model: DenseNet, batch_size: int, image_size: int, compiled: bool = False) -> str:
    """The engine of the dense blocks, such as "shared (Numba)"; of each block where they differ.

    Asks `choose` about a training step on `batch_size` images, under the autocast that is active now.
    """
    parameter = next(model.parameters())
    image = torch.empty((), dtype=parameter.dtype, device=parameter.device)  # which no sharded parameter makes
    images = image.expand(batch_size, model.in_channels, image_size, image_size)
    engines = {}
    for name, block in model.features.named_children():
        if isinstance(block, DenseBlock):
            layer: Any = next(block.children())
            shape = batch_size, layer.norm1.num_features, *images.shape[2:]
            features = images.new_empty((), dtype=compute_dtype(images)).expand(shape)
            engines[name] = describe_plan(block, features, compiled)
    if len(set(engines.values())) == 1:
        return next(iter(engines.values()))
    return ", ".join(f"{engine} in {name}" for name, engine in engines.items())
