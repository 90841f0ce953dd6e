"""Fashion-MNIST and MNIST as published: IDX files, gzipped or not, as torchvision and Debian place them."""

import gzip
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from .images import Images

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_UINT8 = 8


def find(folder: Path) -> Path | None:
    candidates = (folder, folder / "FashionMNIST" / "raw", folder / "MNIST" / "raw")
    return next((path for path in candidates if any(path.glob("train-images-idx3-ubyte*"))), None)


def is_mnist(train: Images) -> bool:
    """Whether the training labels begin as MNIST's do; the files of both sets have the same names."""
    return train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]


def read(folder: Path) -> tuple[Images, Images]:
    """Training and test images."""
    return _read_split(folder, "train"), _read_split(folder, "t10k")


def _read_split(folder: Path, name: str) -> Images:
    images = _read_array(folder / f"{name}-images-idx3-ubyte")
    labels = _read_array(folder / f"{name}-labels-idx1-ubyte")
    if images.dim() != 3 or len(images) != len(labels):
        raise ValueError(f"{folder} is damaged: {len(images)} {name} images have {len(labels)} labels; copy it again")
    return Images(images[:, None], labels.long())


def _read_array(path: Path) -> Tensor:
    """Read an IDX file: two zero bytes, type code (8 is uint8), number of dimensions, their sizes, the data."""
    gzipped = path.with_name(f"{path.name}.gz")
    try:
        content = path.read_bytes() if path.is_file() else gzip.decompress(gzipped.read_bytes())
        type_code, dims = struct.unpack(">HBB", content[:4])[1:]
        shape = struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])
        values = torch.frombuffer(bytearray(content[4 + 4 * dims :]), dtype=torch.uint8)
        if type_code != _UINT8:
            raise ValueError(f"its type code is {type_code}, not {_UINT8}")
        return values.view(shape)
    except FileNotFoundError as exc:
        raise ValueError(f"{path} is missing, but the training and the test set need it: copy it there") from exc
    except (OSError, EOFError, ValueError, RuntimeError, struct.error, zlib.error) as exc:
        raise ValueError(f"{path} is damaged ({str(exc).splitlines()[0]}): copy it again") from exc
