"""Atomic file writes: to a temporary file that is flushed to disk and renamed, so that a reader never sees a part."""

import contextlib
import csv
import io
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from efficient_densenet._archive import load_archive

_SUFFIX = ".unfinished"


def write_atomic(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as exc:
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"{path} could not be written ({exc.strerror or exc}): its previous content is kept; "
            "free some space or give another --save, then continue with --resume"
        ) from exc
    with contextlib.suppress(OSError):  # some file systems cannot flush the new name
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_temporary_files(folder: Path) -> None:
    """Remove what a killed process left half written; only for the process that holds the lock of the directory."""
    for path in folder.glob(f".*{_SUFFIX}"):
        path.unlink(missing_ok=True)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def load_torch(path: Path) -> Any:
    """Load what `to_archive` or `torch.save` wrote, tensors and plain data only: no code in the file is run."""
    return _read(path, load_archive)


def load_json(path: Path) -> Any:
    return _read(path, lambda path: json.loads(path.read_text(encoding="utf-8")))


def _read(path: Path, load: Callable[[Path], Any]) -> Any:
    if not path.is_file():
        found = "is no regular file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {found}: give the directory of a run, or a file of weights in one")
    with damage_named(path):
        try:
            return load(path)
        except OSError as exc:
            raise OSError(
                f"{path} cannot be read ({exc.strerror or exc}): make it readable, or give another run"
            ) from exc


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Raise what reading the content of `path` raises as a sentence: a damaged file can fail in any way."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as exc:
        known = isinstance(exc, (ValueError, zipfile.BadZipFile))
        reason = (
            " ".join(str(exc).split())[:300] if known else f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}"
        )
        raise ValueError(
            f"{path} is truncated, damaged or not what a run of these demos writes ({reason}), and was left unchanged: "
            "restore it from a copy, or give another run"
        ) from exc
