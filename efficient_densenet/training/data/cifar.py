"""CIFAR-10 and CIFAR-100 as torchvision lays them out: pickled batches, of which only plain data is read."""

import hashlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..._extras import need
from .images import Pictures

SIDE = 32


@dataclass(frozen=True)
class Layout:
    """Where a version of CIFAR keeps what."""

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


def find(folder: Path) -> tuple[Path, Layout] | None:
    """The folder with a CIFAR's batches: one below `folder`, or `folder` itself."""
    for layout in LAYOUTS.values():
        for place in (folder / layout.folder, folder):
            batches = any((place / name).is_file() for name in (*layout.train, *layout.test))
            if (place.name == layout.folder and place.is_dir()) or ((place / layout.meta).is_file() and batches):
                return place, layout
    return None


def read(place: Path, layout: Layout) -> tuple[Pictures, Pictures, tuple[str, ...]]:
    """Training pictures, test pictures and class names."""
    classes = _entry(place / layout.meta, layout.classes)
    sets = []
    for names in (layout.train, layout.test):
        batches = [_read_batch(place / name, layout, len(classes)) for name in names]
        sets.append(Pictures(*(torch.cat(parts) for parts in zip(*batches, strict=True))))
    return sets[0], sets[1], tuple(map(str, classes))


def altered_files(place: Path, layout: Layout) -> list[str]:
    """The files whose checksums are not the originals'."""
    theirs = getattr(need("torchvision", extra="demos").datasets, layout.torchvision)
    known = dict(map(tuple, [*theirs.train_list, *theirs.test_list]))
    return [name for name in (*layout.train, *layout.test) if _md5(place / name) != known[name]]


def _read_batch(path: Path, layout: Layout, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    data, labels = _entry(path, "data"), _entry(path, layout.labels)
    array = need("numpy", extra="demos").asarray(data)
    if array.dtype != "uint8" or array.ndim != 2 or array.shape[1] != 3 * SIDE**2 or len(labels) != len(array):
        raise _damaged(path, f"pictures of {array.dtype} {array.shape} with {len(labels)} labels")
    if not all(isinstance(label, int) and 0 <= label < num_classes for label in labels):
        raise _damaged(path, f"labels other than 0 to {num_classes - 1}")
    return torch.from_numpy(array.copy()).view(-1, 3, SIDE, SIDE), torch.tensor(labels, dtype=torch.long)


def _entry(path: Path, key: str) -> Any:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, but torchvision's layout has it: copy it there, or remove {path.parent} "
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
    """Reads arrays, lists and strings, and no class or function besides."""

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
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of pictures needs")
        return allowed[last, name]


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
