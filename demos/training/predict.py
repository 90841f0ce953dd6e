"""Classifying images with a saved model."""

from pathlib import Path

import torch
from torch import Tensor

from efficient_densenet._checks import check_integer
from efficient_densenet.weights.trained import CHECKPOINTS, find_checkpoint

from .data.augment import Transform
from .data.folder import SUFFIXES, decode
from .models import ModelConfig, load_model

DIGITS = CHECKPOINTS / "digits"
COLOR = "cifar10"
"""The name of the weights for images in color."""
MEAN_SATURATION = 8
"""What an image has at least that is in color: of 0 to 255, the mean distance between its channels."""


@torch.no_grad()
def predict(*images: str, model: str | None = None, top: int = 1) -> None:
    """Classify images: print the likeliest classes of each and their probabilities, one line per image.

    Args:
        images: files of any size, or folders of them; they are resized to the size that the model was trained on.
        model: directory of a run, or a file of weights in one, or a name of weights that were trained here; by default
            cifar10 for an image in color, and checkpoints/digits of this repository for any other.
        top: how many classes to print.
    """
    check_integer("top", top, at_least=1)
    if not images:
        raise ValueError("found no image to classify: name one or more files, or folders of them")
    paths = [path for name in images for path in _image_files(Path(str(name)))]
    sources = [_source(path, model) for path in paths]
    models = {source: load_model(source) for source in dict.fromkeys(sources)}
    configs = [models[source][1] for source in sources]
    decoded = [decode(path, config.image_size, config.channels) for path, config in zip(paths, configs, strict=True)]
    for path, image, source in zip(paths, decoded, sources, strict=True):
        network, config = models[source]
        probabilities = network(Transform(config.mean, config.std).normalize(image[None])).softmax(1)[0]
        if not probabilities.isfinite().all():
            raise FloatingPointError(
                f"{path}: the model's outputs are not finite, so its weights are damaged: restore them from a copy"
            )
        print(f"{path}: {_likeliest(probabilities, config, top)}")


def _image_files(path: Path) -> list[Path]:
    """The file itself, or the images in a folder and below it."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder: give the path of an image, or of a folder of images")
    found = sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES and each.is_file())
    if not found:
        raise ValueError(f"{path} contains no images: give a folder with files such as {', '.join(sorted(SUFFIXES))}")
    return found


def _source(image: Path, model: str | None) -> Path:
    """Where the model is read from that classifies this image."""
    if model is not None:
        return find_checkpoint(str(model))
    colors = decode(image, 32)
    return find_checkpoint(COLOR) if _has_color(colors) else DIGITS


def _has_color(image: Tensor) -> bool:
    return bool((image.amax(0) - image.amin(0)).float().mean() >= MEAN_SATURATION)


def _likeliest(probabilities: Tensor, config: ModelConfig, top: int) -> str:
    indices = probabilities.argsort(descending=True)[:top].tolist()
    return ", ".join(f"{config.classes[i]} ({probabilities[i]:.1%})" for i in indices)
