"""The model of a run, rebuilt from its config, and its weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from efficient_densenet._tensors import compute_dtype
from efficient_densenet.engine.choose import describe_plan
from efficient_densenet.models.densenet import DenseNet
from efficient_densenet.models.layers import DenseBlock
from efficient_densenet.models.zoo import VARIANTS, build_configured
from efficient_densenet.weights.config import ModelConfig

from . import files

WEIGHTS, CONFIG = "model.pt", "config.json"


def default_image_size(model: str | None) -> int:
    return 224 if model in VARIANTS and not VARIANTS[model]["small_inputs"] else 32


def weights_of(path: Path) -> Path:
    """The file of weights of a run, which is its folder's or that itself."""
    weights = path / WEIGHTS if path.is_dir() else path
    if not weights.exists():
        raise ValueError(f"{weights} does not exist: give the folder of a run, or a file of weights in one")
    return weights


def load_model(path: Path) -> tuple[DenseNet, ModelConfig]:
    """The trained model, in eval mode, of a run's folder or of a file of weights in one."""
    weights = weights_of(path)
    config = ModelConfig.beside(weights)
    model = build_configured(config)
    read_weights(weights, model)
    return model.eval(), config


def read_weights(path: Path, model: nn.Module | None = None) -> dict[str, Any]:
    """The finite tensors in the file `path`, which are loaded into `model`."""
    state = files.load_torch(path)
    with files.damage_named(path):
        if model is not None:
            model.load_state_dict(state)
        bad = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            raise ValueError(f"{bad[0]} has values that are not finite")
    return state


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
