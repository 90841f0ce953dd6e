"""Classifying images with a saved model."""

from pathlib import Path

import torch

from .._checks import check_integer
from .data.augment import Transform
from .data.decode import decode
from .models import load_model
from .report import print_or_raise

DIGITS = Path(__file__).parents[2] / "checkpoints" / "digits"


@torch.no_grad()
def predict(*images: str, model: str | None = None, top: int = 1) -> None:
    """Classify images: print the likeliest classes of each and their probabilities, one line per image.

    Args:
        images: files, of any size; they are resized to the size that the model was trained on.
        model: directory of a run, or a file of weights in one; by default checkpoints/digits of this repository.
        top: how many classes to print.
    """
    check_integer("top", top, at_least=1)
    if not images:
        raise ValueError("found no image to classify: name one or more files")
    network, config = load_model(DIGITS if model is None else Path(str(model)))
    decoded = []
    for name in images:
        if not Path(str(name)).is_file():
            raise ValueError(f"{name} is not a file: give the path of an image")
        decoded.append(decode(Path(str(name)), config.image_size, config.channels))
    normalize = Transform(config.mean, config.std, padding=0, horizontal_flip=False).normalize
    for name, image in zip(images, decoded, strict=True):
        probabilities = network(normalize(image[None])).softmax(1)[0]
        if not probabilities.isfinite().all():
            raise FloatingPointError(
                f"{name}: the model's outputs are not finite, so its weights are damaged: restore them from a copy"
            )
        likeliest = probabilities.argsort(descending=True)[:top].tolist()
        try:
            print_or_raise(f"{name}: {', '.join(f'{config.classes[i]} ({probabilities[i]:.1%})' for i in likeliest)}")
        except BrokenPipeError:  # nobody reads any more, as after `| head`
            return
        except OSError as exc:
            raise OSError(f"{name}: its classes could not be printed ({exc.strerror}): print to another place") from exc
