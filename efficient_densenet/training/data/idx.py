"""Fashion-MNIST as it is published: idx files, packed or not, as torchvision and Debian place them."""

import gzip
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from .images import Pictures

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def find(folder: Path) -> Path | None:
    places = (folder, folder / "FashionMNIST" / "raw")
    return next((place for place in places if any(place.glob("train-images-idx3-ubyte*"))), None)


def read(place: Path) -> tuple[Pictures, Pictures]:
    return _read_set(place, "train"), _read_set(place, "t10k")


def _read_set(place: Path, name: str) -> Pictures:
    images, labels = _read_array(place / f"{name}-images-idx3-ubyte"), _read_array(place / f"{name}-labels-idx1-ubyte")
    if images.dim() != 3 or len(images) != len(labels):
        raise ValueError(f"{place} is damaged: {len(images)} {name} pictures have {len(labels)} labels; copy it again")
    return Pictures(images[:, None], labels.long())


def _read_array(path: Path) -> Tensor:
    """An idx file: two zeros, a type (8 is uint8), the number of dimensions, their sizes, the values."""
    packed = path.with_name(f"{path.name}.gz")
    try:
        content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
        kind, dims = struct.unpack(">HBB", content[:4])[1:]
        shape = struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])
        values = torch.frombuffer(bytearray(content[4 + 4 * dims :]), dtype=torch.uint8)
        if kind != 8:
            raise ValueError(f"its type is {kind}, not 8")
        return values.view(shape)
    except FileNotFoundError as exc:
        raise ValueError(f"{path} is missing, but the training and the test set need it: copy it there") from exc
    except (OSError, EOFError, ValueError, RuntimeError, struct.error, zlib.error) as exc:
        raise ValueError(f"{path} is damaged ({str(exc).splitlines()[0]}): copy it again") from exc
