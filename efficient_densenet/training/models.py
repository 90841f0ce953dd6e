"""The model of a run, rebuilt from its config, and its weights."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from ..engines.dispatch import describe_plan
from ..engines.precision import compute_dtype
from ..models.densenet import DenseNet
from ..models.layers import DenseBlock
from ..models.zoo import VARIANTS, create_model
from . import files
from .data import Dataset
from .data.augment import Transform
from .options import Options, block_config_for

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

    def build(self, engine: bool | str = True) -> DenseNet:
        arguments: dict[str, Any] = {
            "drop_rate": self.drop_rate,
            "num_classes": len(self.classes),
            "in_channels": self.channels,
            "efficient": True if engine == "best" else engine,
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


def read_config(folder: Path) -> dict[str, Any]:
    config = files.load_json(folder / CONFIG)
    if not isinstance(config, dict) or not {"options", "model", "data"} <= config.keys():
        raise ValueError(f"{folder / CONFIG} does not describe a run of these demos: give the folder of one")
    return config


def load_model(path: Path) -> tuple[DenseNet, ModelConfig]:
    """The trained model, in eval mode, of a run's folder or of a file of weights in one."""
    weights, folder = (path / WEIGHTS, path) if path.is_dir() else (path, path.parent)
    if not weights.exists():
        raise ValueError(f"{weights} does not exist: give the folder of a run, or a file of weights in one")
    config = _parse_config(read_config(folder)["model"], folder / CONFIG)
    model = config.build()
    load_weights(model, files.load_torch(weights), weights)
    return model.eval(), config


def _parse_config(entries: Any, path: Path) -> ModelConfig:
    names = {field.name for field in fields(ModelConfig)}
    entries = entries if isinstance(entries, dict) else {}
    if entries.keys() != names:
        differing = sorted(names.symmetric_difference(entries))
        raise ValueError(
            f"{path} does not describe a model of these demos ({', '.join(differing[:3])}): give the folder of a run"
        )
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in entries.items()}
    return ModelConfig(**values)


def load_weights(model: nn.Module, weights: Any, path: Path) -> None:
    expected = model.state_dict()
    matches = isinstance(weights, dict) and weights.keys() == expected.keys()
    if not matches or any(weights[k].shape != expected[k].shape for k in expected):
        raise ValueError(
            f"{path} contains other tensors than this model has, and was left unchanged: give the folder that it was "
            "trained in, with its config.json"
        )
    model.load_state_dict(weights)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of parameters, and their bytes."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)


def describe_engines(model: DenseNet, batch_size: int, image_size: int, compiled: bool = False) -> str:
    """The engine of the dense blocks, such as "shared (Numba)"; of each block where they differ.

    Asks the dispatcher about a training step on `batch_size` images, under the autocast that is active now.
    """
    parameter = next(model.parameters())
    images = parameter.new_empty(()).expand(batch_size, model.in_channels, image_size, image_size)
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
