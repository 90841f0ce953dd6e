"""Classifying images with a saved model."""

from pathlib import Path

from torch import Tensor

from efficient_densenet._checks import check_integer
from efficient_densenet._images import image_files
from efficient_densenet.classify import Classifier
from efficient_densenet.weights.trained import CHECKPOINTS, find_checkpoint

from .data.folder import decode
from .models import load_model

DIGITS = CHECKPOINTS / "digits"
COLOR = "cifar10"
"""The name of the weights for images in color."""
MEAN_SATURATION = 8
"""What an image has at least that is in color: of 0 to 255, the mean distance between its channels."""


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
    paths = [path for name in images for path in image_files(Path(str(name)))]
    sources = [_source(path, model) for path in paths]
    classifiers = {source: _classifier(source) for source in dict.fromkeys(sources)}
    for path, source in zip(paths, sources, strict=True):
        print(classifiers[source](path, top))


def _classifier(source: Path) -> Classifier:
    network, config = load_model(source)
    return Classifier(network, config.transforms(), config.classes)


def _source(image: Path, model: str | None) -> Path:
    """Where the model is read from that classifies this image."""
    if model is not None:
        return find_checkpoint(str(model))
    colors = decode(image, 32)
    return find_checkpoint(COLOR) if _has_color(colors) else DIGITS


def _has_color(image: Tensor) -> bool:
    return bool((image.amax(0) - image.amin(0)).float().mean() >= MEAN_SATURATION)
