"""Fill an absent directory with a published set, through torchvision; what fails leaves nothing behind."""

import shutil
import tempfile
from pathlib import Path

from ..._extras import need

TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN", "fashion_mnist": "Fashion-MNIST"}


def download(folder: Path, dataset: str) -> None:
    """Make `folder`, absent or empty until now, hold the published set."""
    sets = need("torchvision", extra="demos").datasets
    existing = next(parent for parent in folder.absolute().parents if parent.is_dir())
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=existing))
    except OSError as exc:
        raise OSError(
            f"{folder} is absent or empty, and nothing can be downloaded into it ({exc.strerror}): give another --data"
        ) from exc
    print(f"{folder} is absent or empty: downloading {TITLES[dataset]}", flush=True)
    try:
        _fetch(sets, partial, dataset)
        folder.mkdir(parents=True, exist_ok=True)
        partial.chmod(0o755)
        partial.replace(folder)  # an empty directory gives way
    except (OSError, RuntimeError) as exc:
        reason = " ".join(str(exc).split())
        raise ConnectionError(
            f"{folder} holds no pictures and {TITLES[dataset]} could not be downloaded ({reason}): connect to the "
            "network, or give --data a directory with torchvision's files or with train/ and test/ class folders, "
            "or leave --data out for the digits that ship with the package"
        ) from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch(sets, folder: Path, dataset: str) -> None:
    if dataset == "svhn":
        for split in ("train", "test"):
            sets.SVHN(folder, split=split, download=True)
        return
    kind = {"cifar10": sets.CIFAR10, "cifar100": sets.CIFAR100, "fashion_mnist": sets.FashionMNIST}[dataset]
    kind(folder, download=True)
