"""CIFAR, MNIST and Fashion-MNIST through torchvision, which checks, unpacks and downloads their files."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_densenet._extras import need

from .images import Images


class Published(NamedTuple):
    """A data set of torchvision: what it is called, its class there, and a file or folder that tells it."""

    title: str
    class_name: str
    place: str
    horizontal_flip: bool


DATASETS = {
    "cifar10": Published("CIFAR-10", "CIFAR10", "cifar-10-batches-py", True),
    "cifar100": Published("CIFAR-100", "CIFAR100", "cifar-100-python", True),
    "fashion_mnist": Published("Fashion-MNIST", "FashionMNIST", "FashionMNIST", True),
    "mnist": Published("MNIST", "MNIST", "MNIST", False),
}
"""By the names that `--dataset` takes."""


def find(folder: Path, dataset: str | None) -> str | None:
    """The name of the data set in `folder`: this `dataset`, or by default the first that is there."""
    names = DATASETS if dataset is None else [dataset]
    return next((name for name in names if (folder / DATASETS[name].place).exists()), None)


def read(name: str, folder: Path) -> tuple[Images, Images, tuple[str, ...]]:
    """The training and test images, and the names of the classes."""
    entry = DATASETS[name]
    try:
        train, test = (_class(name)(folder, train=is_train) for is_train in (True, False))
        return _images(train), _images(test), tuple(map(str, train.classes))
    except (RuntimeError, OSError, ValueError, EOFError) as exc:
        raise ValueError(
            f"{folder / entry.place} is incomplete or damaged ({' '.join(str(exc).split())[:200]}): copy it again, or "
            "remove it so that it is downloaded"
        ) from exc


def download(folder: Path, dataset: str) -> None:
    title = DATASETS[dataset].title
    print(f"{folder} has no images: downloading {title} into it", flush=True)
    try:
        for is_train in (True, False):
            _class(dataset)(folder, train=is_train, download=True)
    except (OSError, RuntimeError) as exc:
        raise ConnectionError(
            f"{folder} has no images, and {title} could not be downloaded into it ({' '.join(str(exc).split())}): "
            "connect to the network, or give --data a directory with torchvision's files or with train/ and test/ "
            "class folders, or leave --data out for the digits that ship with the package"
        ) from exc


def _class(name: str) -> Any:
    return getattr(need("torchvision", extra="demos").datasets, DATASETS[name].class_name)


def _images(split: Any) -> Images:
    """torchvision keeps pixels as N × H × W × C (CIFAR) or N × H × W (MNIST)."""
    data: Tensor = torch.as_tensor(split.data)
    data = data[:, None] if data.dim() == 3 else data.permute(0, 3, 1, 2)
    return Images(data.contiguous(), torch.as_tensor(split.targets).long())
