"""The checksums in the archives that `torch.save` writes, which `torch.load` does not verify."""

import zipfile
from pathlib import Path

_DIRECTORY = 0x10
"""An attribute of a record, for which PyTorch reads no data and returns memory as it was."""


def check_archive(path: Path) -> None:
    """Raise zipfile.BadZipFile unless `path` is an archive in which every record has its checksum.

    An archive without any, as PyTorch writes after `torch.serialization.set_crc32_options(False)`, passes.
    """
    with zipfile.ZipFile(path) as archive:
        if not any(record.CRC for record in archive.infolist()):
            return
        directories = [record.filename for record in archive.infolist() if record.external_attr & _DIRECTORY]
        if directories:
            raise zipfile.BadZipFile(f"its record {directories[0]} says that it is a directory")
        try:
            damaged = archive.testzip()
        except (RuntimeError, NotImplementedError) as exc:  # a record that says it is encrypted, or of another version
            raise zipfile.BadZipFile(str(exc)) from exc
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of its record {damaged} is wrong")
