"""Image folders: `train/`, and `test/` or `val/` or both, with a folder of images of any size for each class.

torchvision's `ImageFolder` leaves out folders that cannot be read, and takes hidden ones for classes.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from efficient_densenet._extras import need

from ..machine import check_memory, num_processors
from ..schema import is_utf8
from .decode import decode
from .images import Images, ImageSet, StreamedImages, digest

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
MAX_BYTES_IN_MEMORY = 2**30
"""Data sets of up to this many bytes are decoded once and held on the device."""


class ImageFolder(NamedTuple):
    """Splits by name ("train", "test" and perhaps "val"), class names, and a digest of the files' names and sizes."""

    splits: dict[str, ImageSet]
    classes: tuple[str, ...]
    file_digest: str


def is_image_folder(folder: Path) -> bool:
    return (folder / "train").is_dir()


def read(folder: Path, image_size: int, workers: int, stream: bool | None) -> ImageFolder:
    classes = _class_names(folder / "train")
    names = [name for name in ("train", "val", "test") if (folder / name).is_dir()]
    if names == ["train"]:
        raise ValueError(
            f"{folder} has train/ but neither test/ nor val/: make test/, "
            "with some images of each class in class folders"
        )
    listed = {name: _list_images(folder / name, classes) for name in names}
    num_bytes = sum(len(paths) for paths, _ in listed.values()) * 3 * image_size**2
    stream = num_bytes > MAX_BYTES_IN_MEMORY if stream is None else stream
    if not stream:
        images = f"the images of {folder} at {image_size}×{image_size}"
        check_memory(num_bytes, images, "give --stream, or a smaller --image_size")
    splits: dict[str, ImageSet] = {}
    for name, (paths, labels) in listed.items():
        streamed = StreamedImages(paths, torch.tensor(labels), image_size, workers)
        splits[name] = streamed if stream else read_all(streamed)
    if "test" not in splits:
        splits["test"] = splits.pop("val")
    return ImageFolder(splits, classes, _file_digest(folder, (path for paths, _ in listed.values() for path in paths)))


def read_all(streamed: StreamedImages) -> Images:
    """Decode all images, in threads."""
    size = streamed.image_size
    images = torch.empty(len(streamed), 3, size, size, dtype=torch.uint8)
    tqdm = need("tqdm", extra="demos").tqdm
    with ThreadPoolExecutor(num_processors()) as threads:
        decoded = threads.map(lambda path: decode(path, size), streamed.paths)
        progress = tqdm(decoded, total=len(streamed), desc="reading", unit="image", leave=False, disable=None)
        for i, image in enumerate(progress):
            images[i] = image
    return Images(images, streamed.labels)


def check_images(images: ImageSet, part: slice) -> None:
    """Raise if one of this part of streamed images cannot be decoded, which evaluating would find after hours."""
    if not isinstance(images, StreamedImages):
        return
    with ThreadPoolExecutor(num_processors()) as threads:
        decoded = threads.map(lambda path: decode(path, images.image_size).numel(), images.paths[part])
        for _ in need("tqdm", extra="demos").tqdm(decoded, desc="checking", unit="image", leave=False, disable=None):
            pass


def _file_digest(folder: Path, paths: Iterable[Path]) -> str:
    return digest(os.fsencode(path.relative_to(folder)) + f":{path.stat().st_size}\n".encode() for path in paths)


def _class_names(train: Path) -> tuple[str, ...]:
    names = tuple(sorted(path.name for path in train.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if len(names) < 2:
        raise ValueError(
            f"{train} has {len(names)} class folders, but a classifier needs at least two: make a folder for each class"
        )
    for name in names:
        if not is_utf8(name):
            raise ValueError(f"{train}/{name} is a class whose name is no valid UTF-8, which --save needs: rename it")
    return names


def _image_files(folder: Path) -> Iterator[Path]:
    """The images below `folder`; pipes and devices with an image's name are left out."""
    for parent, _, names in os.walk(folder, onerror=_raise_unless_missing):
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            special = path.exists() and not path.is_file()  # a dangling link remains, and cannot be decoded
            if path.suffix.lower() in SUFFIXES and not special:
                yield path


def has_images(folder: Path) -> bool:
    """Whether there are images in the folder itself: what is below may be a whole file system."""
    return any(path.suffix.lower() in SUFFIXES for path in folder.glob("*"))


def _raise_unless_missing(error: OSError) -> None:
    """A class may lack its folder in a split; a folder that cannot be read is an error, not a few images less."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _list_images(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    """The paths of all images, and their class indices."""
    unknown = [p.name for p in folder.iterdir() if p.is_dir() and p.name not in classes and p.name[0] != "."]
    if unknown:
        raise ValueError(f"{folder / unknown[0]} is a class that train/ does not have: rename it, or add it to train/")
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(_image_files(folder / name))
        if not found:
            raise ValueError(
                f"{folder / name} contains no images: put some there, or remove the class from every folder"
            )
        paths += found
        labels += [label] * len(found)
    return paths, labels
