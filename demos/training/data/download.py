"""Downloading a published data set into an absent directory, through torchvision; a failure leaves nothing behind."""

import contextlib
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

from efficient_densenet._extras import need

TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN", "fashion_mnist": "Fashion-MNIST"}


def download(folder: Path, dataset: str) -> None:
    """Download `dataset` into `folder`, which is absent, empty, or has other files."""
    datasets = need("torchvision", extra="demos").datasets
    temporary = _temporary_directory(folder)
    state = "contains no images" if folder.exists() else "does not exist"
    print(f"{folder} {state}: downloading {TITLES[dataset]} into it", flush=True)
    try:
        _fetch(datasets, temporary, dataset)
        _move(temporary, folder)
    except _NotWritableError:
        raise
    except (OSError, RuntimeError) as exc:
        reason = " ".join(str(exc).split())
        raise ConnectionError(
            f"{folder} {state}, and {TITLES[dataset]} could not be downloaded ({reason}): connect to the "
            "network, or give --data a directory with torchvision's files or with train/ and test/ class folders, "
            "or leave --data out for the digits that ship with the package"
        ) from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _NotWritableError(OSError):
    """Nothing can be written to the directory of the data set, whatever the network does."""

    def __init__(self, folder: Path, cause: OSError) -> None:
        super().__init__(
            f"{folder} is absent or has no images, and nothing can be downloaded into it ({cause.strerror}): give "
            "another --data"
        )


def _temporary_directory(folder: Path) -> Path:
    """Beside `folder`, or in it where nothing can be written beside it."""
    beside = next(parent for parent in folder.absolute().parents if parent.is_dir())
    prefix = f".{folder.name}."
    try:
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=beside))
        return Path(tempfile.mkdtemp(prefix=prefix, dir=folder if folder.is_dir() else beside))
    except OSError as exc:
        raise _NotWritableError(folder, exc) from exc


def _move(temporary: Path, folder: Path) -> None:
    """Move what was downloaded into `folder`, which may be a file system of its own."""
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary.chmod(0o755)
            temporary.replace(folder)
            return
        for downloaded in temporary.iterdir():
            shutil.move(downloaded, folder / downloaded.name)
    except OSError as exc:
        raise _NotWritableError(folder, exc) from exc


def _fetch(datasets: ModuleType, folder: Path, dataset: str) -> None:
    if dataset == "svhn":
        for split in ("train", "test"):
            datasets.SVHN(folder, split=split, download=True)
        return
    classes = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "fashion_mnist": datasets.FashionMNIST}
    classes[dataset](folder, download=True)
