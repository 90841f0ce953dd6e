"""CIFAR-10 and CIFAR-100 in torchvision's layout: pickled batches, from which only plain data is read."""

import hashlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from efficient_densenet._extras import need

from .images import Images

SIDE = 32


@dataclass(frozen=True)
class Layout:
    """File names and keys of a version of CIFAR."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    classes: str
    torchvision: str


LAYOUTS = {
    "cifar10": Layout(
        "CIFAR-10",
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        "batches.meta",
        "labels",
        "label_names",
        "CIFAR10",
    ),
    "cifar100": Layout(
        "CIFAR-100", "cifar-100-python", ("train",), ("test",), "meta", "fine_labels", "fine_label_names", "CIFAR100"
    ),
}


def find(folder: Path, dataset: str | None = None) -> tuple[Path, Layout] | None:
    """The folder that contains the batches of a CIFAR, or of this `dataset` alone: below `folder`, or `folder`."""
    for name, layout in LAYOUTS.items():
        if dataset not in (None, name):
            continue
        for path in (folder / layout.folder, folder):
            batches = any((path / name).is_file() for name in (*layout.train, *layout.test))
            if (path.name == layout.folder and path.is_dir()) or ((path / layout.meta).is_file() and batches):
                return path, layout
    return None


def read(path: Path, layout: Layout) -> tuple[Images, Images, tuple[str, ...]]:
    """Training images, test images and class names."""
    classes = _entry(path / layout.meta, layout.classes)
    splits = []
    for names in (layout.train, layout.test):
        batches = [_read_batch(path / name, layout, len(classes)) for name in names]
        splits.append(Images(*(torch.cat(parts) for parts in zip(*batches, strict=True))))
    return splits[0], splits[1], tuple(map(str, classes))


def modified_files(path: Path, layout: Layout) -> list[str]:
    """The files whose checksums differ from the published ones."""
    published = getattr(need("torchvision", extra="demos").datasets, layout.torchvision)
    known = dict(map(tuple, [*published.train_list, *published.test_list]))
    return [name for name in (*layout.train, *layout.test) if _md5(path / name) != known[name]]


def _read_batch(path: Path, layout: Layout, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    data, labels = _entry(path, "data"), _entry(path, layout.labels)
    array = need("numpy", extra="demos").asarray(data)
    if array.dtype != "uint8" or array.ndim != 2 or array.shape[1] != 3 * SIDE**2 or len(labels) != len(array):
        raise _damaged(path, f"images of {array.dtype} {array.shape} with {len(labels)} labels")
    if not all(isinstance(label, int) and 0 <= label < num_classes for label in labels):
        raise _damaged(path, f"labels other than 0 to {num_classes - 1}")
    return torch.from_numpy(array.copy()).view(-1, 3, SIDE, SIDE), torch.tensor(labels, dtype=torch.long)


def _entry(path: Path, key: str) -> Any:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, but torchvision's layout includes it: copy it there, or remove {path.parent} "
            "so that it is downloaded"
        )
    try:
        with path.open("rb") as file:
            entries = _PlainData(file, encoding="latin1").load()
        return {str(name, "latin1") if isinstance(name, bytes) else name: entries[name] for name in entries}[key]
    except Exception as exc:  # a damaged pickle can fail in any way
        raise _damaged(path, f"{type(exc).__name__}: {exc}") from exc


def _damaged(path: Path, found: str) -> ValueError:
    return ValueError(
        f"{path} is damaged ({found}), but must be a batch in torchvision's layout: copy it again, "
        "or remove its directory so that it is downloaded"
    )


class _PlainData(pickle.Unpickler):
    """An unpickler that allows arrays, lists and strings, and no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        numpy = need("numpy", extra="demos")
        core = getattr(numpy, "_core", None) or numpy.core
        allowed = {
            ("numpy", "ndarray"): numpy.ndarray,
            ("numpy", "dtype"): numpy.dtype,
            ("multiarray", "_reconstruct"): core.multiarray._reconstruct,
            ("numeric", "_frombuffer"): getattr(core.numeric, "_frombuffer", None),
            ("_codecs", "encode"): __import__("_codecs").encode,
        }
        last = module.removeprefix("numpy._core.").removeprefix("numpy.core.")
        if (last, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of images needs")
        return allowed[last, name]


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
