"""Archives of `torch.save`, whose records have checksums that PyTorch does not verify."""

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

_DIRECTORY = 0x10
"""The attribute of a directory record. PyTorch reads no data for such a record and returns uninitialized memory."""


def load_archive(path: Path) -> Any:
    """Load tensors and plain data; raises zipfile.BadZipFile where a checksum is wrong."""
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as records:
        _check_records(records)
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _check_records(archive: zipfile.ZipFile) -> None:
    """Check the CRC of every record, except in an archive that has none (PyTorch after `set_crc32_options(False)`)."""
    records = archive.infolist()
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
