"""Atomic file writes: to a temporary file that is flushed to disk and renamed, so that a reader never sees a part."""

import contextlib
import csv
import io
import json
import os
import secrets
import tempfile
import warnings
import zipfile
from collections.abc import Mapping, Sequence
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
    _flush_directory(path.parent)


def check_writable(folder: Path) -> None:
    """Raise unless `folder`, or its nearest existing parent, accepts files; tried with an unnamed temporary file."""
    try:
        candidates = (folder, *folder.absolute().parents)
        existing = next(path for path in candidates if path.exists() or path.is_symlink())
        if folder == existing and folder.is_file():
            raise FileExistsError(f"{folder} is a file, but a run needs a directory: give another --save")
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as exc:
        if exc.strerror is None:
            raise
        raise _not_writable(folder, exc) from exc


def make_directory(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise _not_writable(folder, exc) from exc


def _not_writable(folder: Path, exc: OSError) -> OSError:
    return OSError(f"nothing can be written to {folder} ({exc.strerror}): give another --save")


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


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def load_torch(path: Path) -> Any:
    """Load what `to_archive` or `torch.save` wrote, tensors and plain data only: no code in the file is run."""
    _refuse_pipe(path)
    try:
        with path.open("rb") as file:
            file.read(1)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: give the folder of a run, or a file of weights in one") from None
    except OSError as exc:
        raise _not_readable(path, exc) from exc
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of tensors that the caller refuses
            return load_archive(path)
    except Exception as exc:  # a damaged archive can fail in any way
        reason = str(exc) if isinstance(exc, zipfile.BadZipFile) else type(exc).__name__
        raise ValueError(
            f"{path} is truncated, damaged or contains more than tensors and plain data ({reason}), "
            "and was left unchanged: copy it again, or give another --save"
        ) from exc


def load_json(path: Path) -> Any:
    _refuse_pipe(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: give the folder of a run, which has one") from None
    except OSError as exc:
        raise _not_readable(path, exc) from exc
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{path} is damaged ({exc}): copy it again, or give another folder") from exc


def _refuse_pipe(path: Path) -> None:
    """Raise for a pipe, a socket or a device, on which reading may wait for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is no regular file, but a pipe or a device: restore it from a copy")


def _not_readable(path: Path, exc: OSError) -> OSError:
    return OSError(f"{path} cannot be read ({exc.strerror or exc}): make it readable, or give another run")


def _flush_directory(folder: Path) -> None:
    """Flush the new name of a file, whose content is on disk already. Some file systems cannot."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
