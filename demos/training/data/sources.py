"""Loading a directory of images as a data set, whose kind is recognized by its contents."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torchvision.transforms.v2 import functional as transforms

from . import digits, folder, published
from .images import Images, ImageSet, StreamedImages, digest, random_split

SPLIT_SEED = 0
"""The validation split is the same in every run, whatever its seed, so that runs can be compared."""


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
    value_range: tuple[float, float] | None = None
    """The values that are 0 and 255 here, where an image folder has images of more than 8 bits."""

    @property
    def channels(self) -> int:
        return self.train.image_shape[0]

    @property
    def image_size(self) -> int:
        return self.train.image_shape[-1]

    @property
    def fingerprint(self) -> str:
        """Identifies the images: the digest of their files, or of pixels and labels where files hold many images."""
        splits = [split for split in (self.train, self.valid, self.test) if isinstance(split, Images)]
        return self.file_digest or digest(part for split in splits for part in (split.images, split.labels))

    def with_validation(self, valid_size: int | None) -> "Dataset":
        """Hold out `valid_size` training images for validation, unless there is a validation set.

        None holds out a tenth, at most 5,000; with 0 there are no images to validate by.
        """
        if self.valid is not None:
            if valid_size is not None:
                raise ValueError(f"valid_size is {valid_size}, but {self.name} has val/ to validate by: leave it out")
            return self
        size = min(5000, round(len(self.train) / 10)) if valid_size is None else valid_size
        if not (0 < size < len(self.train) or size == valid_size == 0):
            raise ValueError(f"valid_size is {size}, but must leave some of the {len(self.train)} images to train on")
        train, valid = random_split(self.train, size, SPLIT_SEED)
        return replace(self, train=train, valid=valid)

    def to(self, device: torch.device) -> "Dataset":
        valid = self.valid and self.valid.to(device)
        return replace(self, train=self.train.to(device), valid=valid, test=self.test.to(device))


def load(
    data: str | None,
    dataset: str | None = None,
    image_size: int | None = None,
    workers: int = 2,
    stream: bool | None = None,
    channels: int | None = None,
    value_range: tuple[float, float] | None = None,
) -> Dataset:
    """The data set in the directory `data`, or the digits if it is None.

    With `channels` the images get so many: gray ones are repeated, colors become gray. `value_range` is of images of
    more than 8 bits, and by default measured over the training images.
    """
    if data is None:
        if dataset is not None:
            raise ValueError(
                f"found --dataset {dataset} without --data: give the directory to read it from, or to download it into"
            )
        train, test = random_split(digits.load_digits(), 359, SPLIT_SEED)
        loaded = Dataset(digits.NAME, train, None, test, tuple("0123456789"), horizontal_flip=False)
        return _in_channels(loaded, channels)
    path = Path(data)
    kind = _recognize(path, dataset)
    if kind is None:
        splits, classes, file_digest, value_range = folder.read(
            path, image_size or 32, channels or 3, workers, stream, value_range
        )
        train, valid, test = splits["train"], splits.get("val"), splits["test"]
        return Dataset(f"image folder {path}", train, valid, test, classes, True, file_digest, value_range)
    entry, (train, test, classes) = published.DATASETS[kind], published.read(kind, path)
    return _in_channels(Dataset(entry.title, train, None, test, classes, entry.horizontal_flip), channels)


def download_if_absent(data: str | None, dataset: str | None) -> None:
    """Fill a directory without images from the network: with `dataset`, or with the one that the directory is named
    after, such as cifar100, if it is absent or empty. (Of another name it may be mistyped.)"""
    path = Path(data or ".")
    if data is None or path.is_file():
        return
    absent = not path.exists() or not any(path.iterdir())
    named = {"cifar": "cifar10", **{name: name for name in published.DATASETS}}.get(path.name)
    if dataset is None and absent and named:
        dataset = named
    if dataset and published.find(path, None) is None and not folder.is_image_folder(path):
        published.download(path, dataset)


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


def _recognize(path: Path, dataset: str | None) -> str | None:
    """The published data set in `path`, or None for an image folder."""
    found = published.find(path, dataset)
    if found or (dataset is None and folder.is_image_folder(path)):
        return found
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    contains = f"contains {', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else "is absent or empty"
    needed = "torchvision's files, or train/ and test/ with a folder of images for each class, are needed"
    if dataset:
        needed = f"--dataset {dataset} needs {published.DATASETS[dataset].title}"
    raise ValueError(
        f"{path} {contains}, but {needed} there: give another --data, or a --dataset to download "
        f"{'beside what is there' if names else 'into it'}"
    )


def _in_channels(dataset: Dataset, channels: int | None) -> Dataset:
    if channels in (None, dataset.channels):
        return dataset

    def convert(images: ImageSet) -> ImageSet:
        assert isinstance(images, Images)  # those of a folder are decoded in their channels
        gray = images.images if dataset.channels == 1 else transforms.rgb_to_grayscale(images.images)
        return Images(gray.expand(-1, channels, -1, -1), images.labels)

    return replace(dataset, train=convert(dataset.train), test=convert(dataset.test))
