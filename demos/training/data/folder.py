"""Image folders: `train/`, and `test/` or `val/` or both, with a folder of images of any size for each class."""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.datasets import ImageFolder

from efficient_densenet._extras import need
from efficient_densenet._images import FORMATS, central_square, is_deep, open_image, to_channels, to_tensor

from .images import Images, ImageSet, StreamedImages, digest

MAX_BYTES_IN_MEMORY = 2**30
"""Data sets of up to this many bytes are decoded once and held on the device."""


Range = tuple[float, float]


def decode(path: str | Path, image_size: int, channels: int = 3, value_range: Range | None = None) -> Tensor:
    """The central square of the image, resized to (channels, image_size, image_size): uint8, or float32 with a
    `value_range`."""
    with open_image(path) as image:
        if value_range is None and is_deep(image):
            raise ValueError("it has more than 8 bits a channel, unlike the training images: convert it to 8 bits")
        square = central_square(to_channels(image, channels, value_range), image_size)
    return (square if value_range is None else square.float()).expand(channels, -1, -1)


def measure_range(paths: list[str], at_most: int = 1000) -> Range | None:
    """The least and greatest value of images of more than 8 bits, among evenly spaced ones; None where there are none.

    What such files declare, if anything, is 16 bits, and many hold 10 or 12.
    """
    lows, highs = list[float](), list[float]()
    for path in paths[:: -(-len(paths) // at_most)]:
        with open_image(path) as image:
            if is_deep(image):
                pixels = to_tensor(image.convert("F"))
                lows.append(float(pixels.min()))
                highs.append(float(pixels.max()))
    if not lows:
        return None
    low, high = min(lows), max(highs)
    return low, high if high > low else low + 1


class ClassFolders(ImageFolder):
    """torchvision's `ImageFolder` of one split, whose classes are those of train/, without hidden files."""

    def __init__(self, root: Path, classes: list[str], decoder: Any) -> None:
        self.names = classes
        super().__init__(os.fspath(root), loader=decoder, is_valid_file=_is_image)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        unknown = sorted(set(class_names(Path(directory))) - set(self.names))
        if unknown:
            raise ValueError(
                f"{Path(directory, unknown[0])} is a class that train/ does not have: rename it, or add it to train/"
            )
        return self.names, {name: label for label, name in enumerate(self.names)}


def class_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def is_image_folder(folder: Path) -> bool:
    return (folder / "train").is_dir()


def read(
    folder: Path, image_size: int, channels: int, workers: int, stream: bool | None, value_range: Range | None
) -> tuple[dict[str, ImageSet], tuple[str, ...], str, Range | None]:
    """The splits by name ("train", "test", perhaps "val"), the classes, a digest of the files' names and sizes, and the
    values of images of more than 8 bits that are black and white, by default those of the training images."""
    classes = class_names(folder / "train")
    if len(classes) < 2:
        raise ValueError(
            f"{folder / 'train'} has {len(classes)} class folders, but a classifier needs at least two: make a folder "
            "for each class"
        )
    names = [name for name in ("train", "val", "test") if (folder / name).is_dir()]
    if names == ["train"]:
        raise ValueError(
            f"{folder} has train/ but neither test/ nor val/: make test/, with a folder of images for each class"
        )
    found = {name: ClassFolders(folder / name, classes, None) for name in names}
    value_range = value_range or measure_range([path for path, _ in found["train"].samples])
    decoder = partial(decode, image_size=image_size, channels=channels, value_range=value_range)
    for files in found.values():
        files.loader = decoder
    if stream is None:
        bytes_of_a_value = 4 if value_range else 1
        stream = sum(map(len, found.values())) * channels * image_size**2 * bytes_of_a_value > MAX_BYTES_IN_MEMORY
    shape, cpu = (channels, image_size, image_size), torch.device("cpu")
    splits: dict[str, ImageSet] = {}
    for name, files in found.items():
        streamed = StreamedImages(files, torch.arange(len(files)), shape, workers, cpu)
        splits[name] = streamed if stream else _decode_all(streamed)
    if "test" not in splits:
        splits["test"] = splits.pop("val")
    files_digest = _file_digest(folder, (path for files in found.values() for path, _ in files.samples))
    return splits, tuple(classes), files_digest, value_range


def _decode_all(streamed: StreamedImages) -> Images:
    order = torch.arange(len(streamed)).split(64)
    tqdm = need("tqdm", extra="demos").tqdm
    batches = tqdm(streamed.fetch(order), "reading", len(order), leave=False, disable=None)
    images, labels = zip(*batches, strict=True)
    return Images(torch.cat(images), torch.cat(labels))


def _is_image(path: str) -> bool:
    return not os.path.basename(path).startswith(".") and os.path.splitext(path)[1].lower() in FORMATS


def _file_digest(folder: Path, paths: Iterable[str]) -> str:
    return digest(os.fsencode(os.path.relpath(p, folder)) + f":{os.stat(p).st_size}\n".encode() for p in paths)
