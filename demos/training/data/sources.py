"""Loading a directory of images as a data set, whose kind is recognized by its contents."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import digits, folder, published
from .images import Images, ImageSet, StreamedImages, digest, random_split
from .published import TITLES

DATASETS = tuple(TITLES)
SPLIT_SEED = 0
"""The validation split is the same in every run, whatever its seed, so that runs can be compared."""

AnyDataset = TypeVar("AnyDataset", bound="Dataset")


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test images, with the names of their classes."""

    name: str
    train: ImageSet
    valid: ImageSet | None
    test: ImageSet
    classes: tuple[str, ...]
    horizontal_flip: bool
    """Whether training flips images by default."""
    file_digest: str = ""
    """Of an image folder: a digest of the names and sizes of its files."""

    @property
    def channels(self) -> int:
        return self.train.images.shape[1] if isinstance(self.train, Images) else self.train.channels

    @property
    def image_size(self) -> int:
        return self.train.images.shape[-1] if isinstance(self.train, Images) else self.train.image_size

    @property
    def fingerprint(self) -> str:
        """Identifies the images: the digest of their files, or of pixels and labels where files hold many images."""
        splits = [split for split in (self.train, self.valid, self.test) if isinstance(split, Images)]
        return self.file_digest or digest(part for split in splits for part in (split.images, split.labels))

    def with_channels(self: AnyDataset, channels: int) -> AnyDataset:
        """The images in the channels that a network takes: gray ones are repeated, colors become gray."""
        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        return replace(
            self, **{name: split.with_channels(channels) for name, split in splits.items() if split is not None}
        )

    def with_validation(self, valid_size: int | None) -> "SplitDataset":
        """Hold out `valid_size` training images for validation, unless there is a validation set.

        None holds out a tenth, at most 5,000; with 0 there are no images to validate by.
        """
        if self.valid is not None:
            if valid_size is not None:
                raise ValueError(f"valid_size is {valid_size}, but {self.name} has val/ to validate by: leave it out")
            return self._split(self.train, self.valid)
        size = min(5000, round(len(self.train) / 10)) if valid_size is None else valid_size
        if not (0 < size < len(self.train) or size == valid_size == 0):
            raise ValueError(f"valid_size is {size}, but must leave some of the {len(self.train)} images to train on")
        return self._split(*random_split(self.train, size, SPLIT_SEED))

    def _split(self, train: ImageSet, valid: ImageSet) -> "SplitDataset":
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values.update(train=train, valid=valid)
        return SplitDataset(**values)


@dataclass(frozen=True)
class SplitDataset(Dataset):
    """A data set that is split for training, with validation images unless that split is empty."""

    valid: ImageSet

    def to(self, device: torch.device) -> "SplitDataset":
        return replace(self, train=self.train.to(device), valid=self.valid.to(device), test=self.test.to(device))


def load(
    data: str | None,
    dataset: str | None = None,
    image_size: int = 32,
    workers: int = 2,
    stream: bool | None = None,
    may_download: bool = True,
) -> Dataset:
    """The data set in the directory `data`, or the digits if it is None.

    With a `dataset` it is that one; if the directory has no images, it is downloaded into it. Without, it is what the
    directory has; if it is absent or empty, CIFAR-10 is downloaded.
    """
    if data is None:
        if dataset is not None:
            raise ValueError(
                f"found --dataset {dataset} without --data: give the directory to read it from, or to download it into"
            )
        train, test = random_split(digits.load_digits(), 359, SPLIT_SEED)
        return Dataset(digits.NAME, train, None, test, published.DIGITS, horizontal_flip=False)
    try:
        return _load(Path(data), dataset, image_size, workers, stream, may_download)
    except PermissionError as exc:
        raise PermissionError(
            f"{exc.filename or data} cannot be read: change its permissions, or give another --data"
        ) from exc


def check_options_of_folders(dataset: Dataset, image_size: int | None, stream: bool | None) -> None:
    """Raise for options that only the images of a folder have a use for, where there are others."""
    size = dataset.image_size
    if image_size not in (None, size):
        raise ValueError(
            f"found --image_size {image_size}, but the images of {dataset.name} have {size}×{size}, and only those of "
            "an image folder are resized: leave it out"
        )
    if stream and not isinstance(dataset.train, StreamedImages):
        raise ValueError(f"found --stream, but only an image folder is streamed, and not {dataset.name}: leave it out")


def _load(
    path: Path, dataset: str | None, image_size: int, workers: int, stream: bool | None, may_download: bool
) -> Dataset:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, but --data needs a directory of images")
    if not path.exists() or not any(path.iterdir()):
        if not may_download:
            raise ValueError(f"{path} is absent or empty, but images are needed there: give their place with --data")
        published.download(path, dataset or "cifar10")
    elif dataset and may_download and not any(find(path) for find in _FINDERS):
        published.download(path, dataset)
    if dataset is None and folder.is_image_folder(path) and not published.find_cifar(path):
        splits, classes, file_digest = folder.read(path, image_size, workers, stream)
        train, valid, test = splits["train"], splits.get("val"), splits["test"]
        name = f"image folder {os.fsencode(path).decode(errors='replace')}"
        return Dataset(name, train, valid, test, classes, horizontal_flip=True, file_digest=file_digest)
    found = _read_published(path, dataset)
    if found is None:
        raise ValueError(_describe_other_content(path, dataset))
    name, train, test, classes = found
    return Dataset(name, train, None, test, classes, horizontal_flip=classes != published.DIGITS)


_FINDERS = (published.find_cifar, folder.is_image_folder, published.find_mnist, published.has_svhn)


def _read_published(path: Path, dataset: str | None) -> published.Splits | None:
    """This `dataset`, or by default the first that is in the directory."""
    cifar = published.find_cifar(path, dataset)
    if cifar:
        return published.read_cifar(*cifar)
    mnist = published.find_mnist(path) if dataset in (None, "fashion_mnist") else None
    if mnist:
        found = published.read_mnist(mnist)
        if dataset is None or found[0] == TITLES[dataset]:
            return found
    return published.read_svhn(path) if dataset in (None, "svhn") and published.has_svhn(path) else None


def _describe_other_content(path: Path, dataset: str | None) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    contains = f"{path} contains {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    if dataset:
        return (
            f"{contains}, but --dataset {dataset} needs {TITLES[dataset]} there: leave --dataset out to take what is "
            "there, or give another --data"
        )
    if any(folder.has_images(entry) for entry in path.iterdir() if entry.is_dir()):
        return (
            f"{contains}, but no train/: move the folders of the classes into {path / 'train'}, and some images of "
            f"each class into folders of the same names in {path / 'test'}"
        )
    return (
        f"{contains}, but a directory of images needs torchvision's CIFAR files, or train/ and test/ with a folder of "
        "images for each class: give another --data, or a --dataset to download beside what is there"
    )
