"""Downloading a published data set into an absent directory, through torchvision; a failure leaves nothing behind."""

import shutil
import tempfile
from pathlib import Path
from types import ModuleType

from ..._extras import need

TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN", "fashion_mnist": "Fashion-MNIST"}


def download(folder: Path, dataset: str) -> None:
    """Download `dataset` into `folder`, which is absent, empty, or has other files."""
    datasets = need("torchvision", extra="demos").datasets
    existing = next(parent for parent in folder.absolute().parents if parent.is_dir())
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=existing))
    except OSError as exc:
        raise OSError(
            f"{folder} is absent or empty, and nothing can be downloaded into it ({exc.strerror}): give another --data"
        ) from exc
    print(f"{folder} contains no images: downloading {TITLES[dataset]}", flush=True)
    try:
        _fetch(datasets, temporary, dataset)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            for downloaded in temporary.iterdir():
                downloaded.replace(folder / downloaded.name)
        else:
            temporary.chmod(0o755)
            temporary.replace(folder)  # which replaces an empty directory
    except (OSError, RuntimeError) as exc:
        reason = " ".join(str(exc).split())
        raise ConnectionError(
            f"{folder} contains no images and {TITLES[dataset]} could not be downloaded ({reason}): connect to the "
            "network, or give --data a directory with torchvision's files or with train/ and test/ class folders, "
            "or leave --data out for the digits that ship with the package"
        ) from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch(datasets: ModuleType, folder: Path, dataset: str) -> None:
    if dataset == "svhn":
        for split in ("train", "test"):
            datasets.SVHN(folder, split=split, download=True)
        return
    classes = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "fashion_mnist": datasets.FashionMNIST}
    classes[dataset](folder, download=True)
