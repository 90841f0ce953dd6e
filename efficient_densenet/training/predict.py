"""Classify pictures with a saved model."""

from pathlib import Path

import torch

from .._checks import check_integer
from .data.augment import Preparation
from .data.decode import decode
from .models import load_model

DIGITS = Path(__file__).parents[2] / "checkpoints" / "digits"


@torch.no_grad()
def predict(*pictures: str, model: str | None = None, top: int = 1) -> None:
    """Say what pictures show, a line each: the likeliest classes and their probabilities.

    Args:
        pictures: files, of any size; they are brought to the size that the model was trained on.
        model: directory of a run, or a file of weights in one; by default checkpoints/digits of this repository.
        top: how many classes to name.
    """
    check_integer("top", top, at_least=1)
    if not pictures:
        raise ValueError("found no picture to classify: name one or more files")
    network, description = load_model(DIGITS if model is None else Path(str(model)))
    images = []
    for picture in pictures:
        if not Path(str(picture)).is_file():
            raise ValueError(f"{picture} is not a file: give the path of a picture")
        images.append(decode(Path(str(picture)), description.image_size, description.channels))
    prepare = Preparation(description.mean, description.std, distance=0, mirror=False).normalise
    for picture, image in zip(pictures, images, strict=True):
        probabilities = network(prepare(image[None])).softmax(1)[0]
        likeliest = probabilities.argsort(descending=True)[:top].tolist()
        print(f"{picture}: {', '.join(f'{description.classes[i]} ({probabilities[i]:.1%})' for i in likeliest)}")
