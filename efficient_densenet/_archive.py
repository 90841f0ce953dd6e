"""Archives of `torch.save` that end with a checksum of all that is before it.

It stands in the comment of the ZIP archive, which `torch.load` skips. PyTorch itself verifies nothing.
"""

import hashlib
import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

_MARK = b"sha256:"
_LENGTH = len(_MARK) + 2 * hashlib.sha256().digest_size
_DIRECTORY = 0x10
"""The attribute of a directory record. PyTorch reads no data for such a record and returns uninitialized memory."""


def to_archive(content: Any) -> bytes:
    """The bytes that `torch.save` writes, and their checksum."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    archive = buffer.getvalue()[:-2] + struct.pack("<H", _LENGTH)  # an archive ends with the length of its comment
    return archive + _checksum(archive)


def load_archive(path: Path) -> Any:
    """Load tensors and plain data; raises zipfile.BadZipFile where a checksum is wrong.

    Files that plain `torch.save` wrote have only those of ZIP, one for each record.
    """
    content = path.read_bytes()
    archive, checksum = content[:-_LENGTH], content[-_LENGTH:]
    if checksum.startswith(_MARK) and checksum != _checksum(archive):
        raise zipfile.BadZipFile("its checksum is wrong")
    if not checksum.startswith(_MARK):
        with zipfile.ZipFile(io.BytesIO(content)) as records:
            _check_records(records)
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _checksum(archive: bytes) -> bytes:
    return _MARK + hashlib.sha256(archive).hexdigest().encode()


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
