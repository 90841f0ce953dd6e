"""A folder of class folders with pictures of any size: `train/`, and `test/` or `val/` or both."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..._extras import need
from .decode import decode
from .images import Pictures, Streamed, digest

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
IN_MEMORY = 2**30
"""Sets of up to this many bytes are read once and kept on the device."""


def is_one(folder: Path) -> bool:
    return (folder / "train").is_dir()


def read(folder: Path, image_size: int, workers: int, stream: bool | None) -> tuple[dict, tuple[str, ...], str]:
    """The sets by name ("train", "test" and perhaps "val"), the class names, a digest of the files' names and sizes."""
    classes = _class_names(folder / "train")
    names = [name for name in ("train", "val", "test") if (folder / name).is_dir()]
    if names == ["train"]:
        raise ValueError(
            f"{folder} has train/ but neither test/ nor val/: make test/, "
            "with some pictures of each class in class folders"
        )
    listed = {name: _list_pictures(folder / name, classes) for name in names}
    num_bytes = sum(len(paths) for paths, _ in listed.values()) * 3 * image_size**2
    stream = num_bytes > IN_MEMORY if stream is None else stream
    sets = {}
    for name, (paths, numbers) in listed.items():
        labels = torch.tensor(numbers)
        files = Streamed(paths, labels, image_size, workers)
        sets[name] = files if stream else read_all(files)
    if "test" not in sets:
        sets["test"] = sets.pop("val")
    files = (path for paths, _ in listed.values() for path in paths)
    return sets, classes, digest(f"{path.relative_to(folder)}:{path.stat().st_size}\n".encode() for path in files)


def read_all(files: Streamed) -> Pictures:
    """The pictures themselves, decoded in threads."""
    images = torch.empty(len(files), 3, files.image_size, files.image_size, dtype=torch.uint8)
    bar = need("tqdm", extra="demos").tqdm
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        decoded = threads.map(lambda path: decode(path, files.image_size), files.paths)
        shown = bar(decoded, total=len(files), desc="reading", unit="picture", leave=False, disable=None)
        for i, image in enumerate(shown):
            images[i] = image
    return Pictures(images, files.labels)


def _class_names(train: Path) -> tuple[str, ...]:
    names = tuple(sorted(path.name for path in train.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if len(names) < 2:
        raise ValueError(
            f"{train} has {len(names)} class folders, but a classifier needs at least two: make one a class"
        )
    return names


def _list_pictures(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    unknown = [p.name for p in folder.iterdir() if p.is_dir() and p.name not in classes and p.name[0] != "."]
    if unknown:
        raise ValueError(f"{folder / unknown[0]} is a class that train/ does not have: rename it, or add it to train/")
    paths, numbers = [], []
    for number, name in enumerate(classes):
        found = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in SUFFIXES and p.name[0] != ".")
        if not found:
            if (folder / name).is_dir():
                next((folder / name).iterdir(), None)  # raises where it may not be read, which rglob passes over
            raise ValueError(
                f"{folder / name} holds no pictures: put some there, or remove the class from every folder"
            )
        paths += found
        numbers += [number] * len(found)
    return paths, numbers
