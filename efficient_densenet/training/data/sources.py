"""What a directory of pictures holds, told from what lies in it."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..._extras import need
from . import cifar, digits, folder, idx
from .download import TITLES, download
from .images import Pictures, Streamed, digest, split_off

DATASETS = tuple(TITLES)
SPLIT_SEED = 0
"""Validation pictures are the same in every run, whatever its seed, so that runs can be compared."""


@dataclass(frozen=True)
class Source:
    """What a run trains on, chooses its best epoch by, and is judged by in the end."""

    name: str
    train: Pictures | Streamed
    valid: Pictures | Streamed | None
    test: Pictures | Streamed
    classes: tuple[str, ...]
    mirror: bool
    note: str = ""
    listed: str = ""
    """What the names and sizes of an image folder's files digest to."""

    @property
    def channels(self) -> int:
        return self.train.images.shape[1] if isinstance(self.train, Pictures) else 3

    @property
    def image_size(self) -> int:
        return self.train.images.shape[-1] if isinstance(self.train, Pictures) else self.train.image_size

    @property
    def fingerprint(self) -> str:
        """Tells these pictures from others: by their files, or by pixels and labels where they share files."""
        sets = [pictures for pictures in (self.train, self.valid, self.test) if pictures is not None]
        return self.listed or digest(part for pictures in sets for part in (pictures.images, pictures.labels))

    def to(self, device: torch.device) -> "Source":
        return replace(self, **{name: getattr(self, name).to(device) for name in ("train", "valid", "test")})

    def with_validation(self, valid_size: int | None) -> "Source":
        """Set `valid_size` training pictures aside, at most a tenth where it is None, unless a set was made for it."""
        if self.valid is not None:
            if valid_size is not None:
                raise ValueError(f"valid_size is {valid_size}, but {self.name} has val/ to validate by: leave it out")
            return self
        size = min(5000, round(len(self.train) / 10)) if valid_size is None else valid_size
        if not 0 < size < len(self.train):
            raise ValueError(f"valid_size is {size}, but must leave some of the {len(self.train)} pictures to train on")
        rest, aside = split_off(self.train, size, SPLIT_SEED)
        return replace(self, train=rest, valid=aside)


def load(
    data: str | None,
    dataset: str = "cifar10",
    image_size: int = 32,
    workers: int = 2,
    stream: bool | None = None,
    may_download: bool = True,
) -> Source:
    """The pictures in the directory `data`, downloaded there if it is absent or empty; without one the digits."""
    if data is None:
        rest, test = split_off(digits.load_digits(), 359, SPLIT_SEED)
        return Source(digits.NAME, rest, None, test, digits.CLASSES, mirror=False)
    try:
        return _load(Path(data), dataset, image_size, workers, stream, may_download)
    except PermissionError as exc:
        raise PermissionError(
            f"{exc.filename or data} may not be read: change its permissions, or give another --data"
        ) from exc


def _load(place: Path, dataset: str, image_size: int, workers: int, stream: bool | None, may_download: bool) -> Source:
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place} is a file, but --data needs a directory of pictures")
    if not place.exists() or not any(place.iterdir()):
        if not may_download:
            raise ValueError(
                f"{place} is absent or empty, but a run was begun with pictures there: say where they lie with --data"
            )
        download(place, dataset)
    return _recognised(place, image_size, workers, stream)


def _recognised(place: Path, image_size: int, workers: int, stream: bool | None) -> Source:
    found = cifar.find(place)
    if found:
        train, test, classes = cifar.read(*found)
        altered = cifar.altered_files(*found)
        note = f"not the original files: the checksums of {', '.join(altered)} differ" if altered else ""
        return Source(found[1].name, train, None, test, classes, mirror=True, note=note)
    if folder.is_one(place):
        sets, classes, listed = folder.read(place, image_size, workers, stream)
        name = f"image folder {place}"
        return Source(name, sets["train"], sets.get("val"), sets["test"], classes, mirror=True, listed=listed)
    if idx.find(place):
        train, test = idx.read(idx.find(place))
        return Source("Fashion-MNIST", train, None, test, idx.CLASSES, mirror=True)
    if (place / "train_32x32.mat").exists():
        return _svhn(place)
    names = sorted(path.name for path in place.iterdir())
    raise ValueError(
        f"{place} holds {', '.join(names[:3])}{', …' if len(names) > 3 else ''}, but a directory of pictures needs "
        "torchvision's CIFAR files, or train/ and test/ with a folder of pictures for each class: give another --data"
    )


def _svhn(place: Path) -> Source:
    need("scipy", extra="svhn")
    try:
        sets = [need("torchvision", extra="demos").datasets.SVHN(place, split=split) for split in ("train", "test")]
    except (RuntimeError, OSError, ValueError) as exc:
        raise ValueError(f"{place} is damaged ({exc}): remove it so that SVHN is downloaded again") from exc
    train, test = (Pictures(torch.from_numpy(s.data), torch.from_numpy(s.labels).long()) for s in sets)
    return Source("SVHN", train, None, test, tuple("0123456789"), mirror=False)
