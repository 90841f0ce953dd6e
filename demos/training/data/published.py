"""CIFAR, SVHN, Fashion-MNIST and MNIST: found in a directory, read, checked and downloaded through torchvision.

Only files with the published checksums are read of CIFAR and SVHN, so that no pickle runs code of somebody else. MNIST
and Fashion-MNIST are read here: torchvision takes neither gzipped files nor those that lie in the directory itself, and
what is damaged in an unpacked file it does not say.
"""

import gzip
import shutil
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from efficient_densenet._extras import need

from .images import Images

TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN", "fashion_mnist": "Fashion-MNIST"}
"""By the names that `--dataset` takes."""
DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "svhn": "SVHN", "fashion_mnist": "FashionMNIST"}
_UINT8 = 8

Splits = tuple[str, Images, Images, tuple[str, ...]]
"""The title of a data set, its training and test images, and the names of its classes."""


def _torchvision_class(name: str) -> Any:
    return getattr(need("torchvision", extra="demos").datasets, _TORCHVISION[name])


def find_cifar(folder: Path, dataset: str | None = None) -> tuple[str, Path] | None:
    """The name of a CIFAR, or of this `dataset` alone, and the root that torchvision needs: `folder` or its parent."""
    for name in ("cifar10", "cifar100"):
        below = _torchvision_class(name).base_folder
        if dataset in (None, name):
            if (folder / below).is_dir():
                return name, folder
            if folder.name == below and folder.is_dir():
                return name, folder.parent
    return None


def read_cifar(name: str, root: Path) -> Splits:
    published = _torchvision_class(name)
    try:
        train, test = (published(root, train=train) for train in (True, False))
    except RuntimeError as exc:
        raise ValueError(_describe_damage(published, root / published.base_folder)) from exc
    train_images, test_images = (Images(_to_nchw(split.data), torch.tensor(split.targets)) for split in (train, test))
    return TITLES[name], train_images, test_images, tuple(train.classes)


def _describe_damage(published: Any, folder: Path) -> str:
    check_integrity = need("torchvision.datasets.utils", extra="demos").check_integrity
    meta = published.meta["filename"], published.meta["md5"]
    for name, md5 in (*published.train_list, *published.test_list, meta):
        path = folder / name
        if not check_integrity(path, md5):
            found = "is damaged (its checksum is not the published one)" if path.exists() else "is missing"
            return f"{path} {found}: copy it again, or remove {folder} so that it is downloaded"
    return f"{folder} cannot be read"


def _to_nchw(array: Any) -> Tensor:
    return torch.from_numpy(array).permute(0, 3, 1, 2).contiguous()


def has_svhn(folder: Path) -> bool:
    return (folder / "train_32x32.mat").exists()


def read_svhn(folder: Path) -> Splits:
    need("scipy", extra="svhn")
    try:
        splits = [_torchvision_class("svhn")(folder, split=split) for split in ("train", "test")]
    except (RuntimeError, OSError, ValueError) as exc:
        raise ValueError(f"{folder} is damaged ({exc}): remove it so that SVHN is downloaded again") from exc
    train, test = (Images(torch.from_numpy(split.data), torch.from_numpy(split.labels)) for split in splits)
    return TITLES["svhn"], train, test, DIGITS


def find_mnist(folder: Path) -> Path | None:
    candidates = (folder, folder / "FashionMNIST" / "raw", folder / "MNIST" / "raw")
    return next((path for path in candidates if any(path.glob("train-images-idx3-ubyte*"))), None)


def read_mnist(folder: Path) -> Splits:
    """MNIST if the training labels begin as its labels do: the files of both sets have the same names."""
    train, test = _read_idx_split(folder, "train"), _read_idx_split(folder, "t10k")
    if train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]:
        return "MNIST", train, test, DIGITS
    return TITLES["fashion_mnist"], train, test, _CLOTHES


def _read_idx_split(folder: Path, split: str) -> Images:
    images, labels = (_read_idx(folder / f"{split}-{name}-ubyte") for name in ("images-idx3", "labels-idx1"))
    if images.dim() != 3 or len(images) != len(labels):
        raise ValueError(f"{folder} is damaged: {len(images)} {split} images have {len(labels)} labels; copy it again")
    return Images(images[:, None], labels.long())


def _read_idx(path: Path) -> Tensor:
    """Read an IDX file: two zero bytes, type code (8 is uint8), number of dimensions, their sizes, the data."""
    try:
        content = path.read_bytes() if path.is_file() else gzip.decompress(Path(f"{path}.gz").read_bytes())
        type_code, dims = struct.unpack(">HBB", content[:4])[1:]
        if type_code != _UINT8:
            raise ValueError(f"its type code is {type_code}, not {_UINT8}")
        shape = struct.unpack_from(f">{dims}I", content, 4)
        return torch.frombuffer(bytearray(content[4 + 4 * dims :]), dtype=torch.uint8).view(shape)
    except FileNotFoundError as exc:
        raise ValueError(f"{path} is missing, but the training and the test set need it: copy it there") from exc
    except (OSError, EOFError, ValueError, RuntimeError, struct.error, zlib.error) as exc:
        raise ValueError(f"{path} is damaged ({str(exc).splitlines()[0]}): copy it again") from exc


def download(folder: Path, dataset: str) -> None:
    """Download `dataset` into `folder`, which is absent, empty, or has other files; a failure leaves nothing behind."""
    state = "contains no images" if folder.exists() else "does not exist"
    created = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as exc:
        raise OSError(
            f"{folder} is absent or has no images, and nothing can be downloaded into it ({exc.strerror}): give "
            "another --data"
        ) from exc
    print(f"{folder} {state}: downloading {TITLES[dataset]} into it", flush=True)
    before = set(folder.iterdir())
    try:
        _fetch(folder, dataset)
    except BaseException as exc:
        for path in set(folder.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in created:
            path.rmdir()
        if not isinstance(exc, (OSError, RuntimeError)):
            raise
        reason = " ".join(str(exc).split())
        raise ConnectionError(
            f"{folder} {state}, and {TITLES[dataset]} could not be downloaded ({reason}): connect to the "
            "network, or give --data a directory with torchvision's files or with train/ and test/ class folders, "
            "or leave --data out for the digits that ship with the package"
        ) from exc


def _fetch(folder: Path, dataset: str) -> None:
    published = _torchvision_class(dataset)
    for arguments in ({"split": "train"}, {"split": "test"}) if dataset == "svhn" else ({},):
        published(folder, download=True, **arguments)
