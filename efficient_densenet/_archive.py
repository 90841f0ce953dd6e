"""Archives of `torch.save` with two kinds of checksums: ZIP's CRC of each record, and our hash of each tensor.

`torch.load` verifies neither.
"""

import ctypes
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CHECKSUMS = "checksums.json"
"""The name of the record with our hashes. PyTorch does not read it, so `torch.load` returns the content alone."""
_DIRECTORY = 0x10
"""The attribute of a directory record. PyTorch reads no data for such a record and returns uninitialized memory."""


def to_archive(content: Any) -> bytes:
    """The bytes that `torch.save` writes, with a record of each tensor's checksum."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(zipfile.ZipInfo(_checksums_path(archive)), json.dumps(_checksums(content)))
    return buffer.getvalue()


def load_archive(path: Path) -> Any:
    """Load tensors and plain data; raises zipfile.BadZipFile if a record or a tensor does not match its checksum."""
    with zipfile.ZipFile(path) as archive:
        _check_records(archive)
        content = torch.load(path, map_location="cpu", weights_only=True)
        if _checksums_path(archive) in archive.namelist():  # files written by plain `torch.save` have none
            _check_tensors(content, json.loads(archive.read(_checksums_path(archive))))
    return content


def _check_records(archive: zipfile.ZipFile) -> None:
    """Check the CRC of every record, except in an archive that has none (PyTorch after `set_crc32_options(False)`)."""
    records = [record for record in archive.infolist() if record.filename != _checksums_path(archive)]
    if not any(record.CRC for record in records):
        return
    directories = [record.filename for record in records if record.external_attr & _DIRECTORY]
    if directories:
        raise zipfile.BadZipFile(f"its record {directories[0]} says that it is a directory")
    try:
        damaged = archive.testzip()
    except (RuntimeError, NotImplementedError) as exc:  # a record marked as encrypted or of another version
        raise zipfile.BadZipFile(str(exc)) from exc
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of its record {damaged} is wrong")


def _check_tensors(content: Any, needed: Mapping[str, str]) -> None:
    found = _checksums(content)
    for name in {**needed, **found}:
        if found.get(name) != needed.get(name):
            raise zipfile.BadZipFile(
                f"its tensor {name} has the checksum {found.get(name)}, but was saved with {needed.get(name)}"
            )


def _checksums(content: Any) -> dict[str, str]:
    return {name: _checksum(tensor) for name, tensor in _tensors(content)}


def _tensors(content: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in dicts and lists, by the keys that lead to it, such as "state.model.classifier.weight"."""
    if isinstance(content, Tensor):
        yield name, content
    elif isinstance(content, (Mapping, list, tuple)):
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in items:
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


def _checksum(tensor: Tensor) -> str:
    """A hash of the tensor's dtype, shape and values, independent of its memory format."""
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    content = ctypes.string_at(values.data_ptr(), values.numel())  # PyTorch works without NumPy
    return hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + content, digest_size=8).hexdigest()


def _checksums_path(archive: zipfile.ZipFile) -> str:
    """The path of our record: PyTorch requires all records to be in the folder of the first record."""
    return f"{archive.namelist()[0].partition('/')[0]}/{_CHECKSUMS}"
