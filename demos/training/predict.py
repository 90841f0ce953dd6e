"""Classifying images with a saved model."""

from pathlib import Path

from torch import Tensor

from efficient_densenet._checks import check_integer
from efficient_densenet._images import image_files
from efficient_densenet.classify import Classifier
from efficient_densenet.weights.trained import CHECKPOINTS, find_checkpoint

<<<<<<< HEAD
from .data.augment import Transform
from .data.folder import SUFFIXES, decode
from .models import ModelConfig, load_model
=======
from .data.folder import decode
from .models import load_model
from .report import print_or_raise
>>>>>>> main

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
<<<<<<< HEAD
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
=======
    classifiers = {source: _classifier(source) for source in dict.fromkeys(sources)}
    for path, source in zip(paths, sources, strict=True):
        try:
            print_or_raise(str(classifiers[source](path, top)))
        except BrokenPipeError:  # nobody reads any more, as after `| head`
            return
        except OSError as exc:
            raise OSError(f"{path}: its classes could not be printed ({exc.strerror}): print to another place") from exc
>>>>>>> main


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
