"""Images and their likeliest classes, by a trained model: efficient-densenet predict"""

import argparse
import csv
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ._checks import check, integer
from ._images import UndecodableImage, image_files, open_image, to_channels, to_tensor
from .models.densenet import DenseNet
from .models.zoo import build_configured, create_model
from .weights.config import ModelConfig
from .weights.load import load_weights
from .weights.named import PUBLISHED, TRAINED, find_checkpoint, weights_classes, weights_transforms

if TYPE_CHECKING:
    from PIL.Image import Image


class Prediction(NamedTuple):
    """The likeliest classes of an image with their probabilities."""

    path: Path
    likeliest: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        classes = ", ".join(f"{name} ({probability:.1%})" for name, probability in self.likeliest)
        return f"{self.path}: {classes}"


@dataclass(frozen=True)
class Classifier:
    """A model, the preparation of its images, and the names of its classes."""

    model: DenseNet
    prepare: Callable[[Any], Tensor]
    classes: tuple[str, ...]

    @torch.no_grad()
    def __call__(self, path: Path, top: int = 1) -> Prediction:
        """The `top` likeliest classes of the image in a file."""
        device = next(self.model.parameters()).device
        with open_image(path) as image:
            x = self.prepare(image).to(device)
        probabilities = self.model(x[None]).softmax(1)[0]
        if not probabilities.isfinite().all():
            raise FloatingPointError(
                f"{path}: the model's outputs are not finite, so its weights are damaged: restore them from a copy"
            )
        found = probabilities.argsort(descending=True)[:top].tolist()
        return Prediction(path, tuple((self.classes[i], float(probabilities[i])) for i in found))


def load_classifier(source: str) -> Classifier:
    """The classifier of torchvision's weights by the name of their model, of weights of this package by their name, or
    of a folder with model.pt and config.json, as training by the demos writes it."""
    if source in PUBLISHED:
        model = create_model(source, weights="DEFAULT")
        transforms = weights_transforms(source)

        def prepare(image: "Image") -> Tensor:
            gray_or_rgb = to_channels(image, 3)
            deep = to_tensor(gray_or_rgb).expand(3, -1, -1) / 255 if gray_or_rgb.mode == "F" else None
            return transforms(gray_or_rgb if deep is None else deep)

        return Classifier(model.eval(), prepare, weights_classes(source))
    path = find_checkpoint(source)
    weights = path / "model.pt" if path.is_dir() else path
    if not weights.is_file():
        raise ValueError(
            f"{weights} does not exist: give a folder with model.pt and config.json, as training by the demos writes "
            f"it, or the name of weights: {', '.join((*PUBLISHED, *TRAINED))}"
        )
    config = ModelConfig.beside(weights)
    model = build_configured(config)
    load_weights(model, weights)
    return Classifier(model.eval(), config.transforms(), config.classes)


def main(words: list[str] | None = None) -> None:
    try:
        undecodable = _predict(make_parser().parse_args(words))
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
    if undecodable:
        raise SystemExit(f"error: {undecodable} of the files could not be decoded, as noted above")


def _predict(options: argparse.Namespace) -> int:
    """Print predictions as they are made, and write the files. Returns the number of images that cannot be decoded."""
    check("top", options.top, integer(1))
    paths, undecodable = [path for each in options.images for path in image_files(each)], 0
    classifier = load_classifier(options.model)
    classifier.model.to("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as files:
        writes = {"newline": "", "encoding": "utf-8", "errors": "backslashreplace"}
        table = options.csv and csv.writer(files.enter_context(options.csv.open("w", **writes)))
        if table:
            table.writerow(("image", "rank", "class", "probability"))
        for path in paths:
            try:
                prediction = classifier(path, options.top)
            except UndecodableImage as error:
                print(f"note: {error}", file=sys.stderr)
                undecodable += 1
                continue
            print(prediction, flush=True)
            if table:
                table.writerows((path, rank, *found) for rank, found in enumerate(prediction.likeliest, 1))
    return undecodable


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="efficient-densenet predict", description="The likeliest classes of images, and their probabilities."
    )
    names = ", ".join((*PUBLISHED, *TRAINED))
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="a file, or a folder of them")
    parser.add_argument(
        "--model",
        default="densenet121",
        help=f"a folder with model.pt and config.json, as training by the demos writes it, or weights by name: {names}",
    )
    parser.add_argument("--top", type=int, default=3, help="classes to print of each")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a table, a row for each image and class")
    return parser
