"""Files written whole: beside their names, flushed to the disk and renamed, so that one sees the old or the new."""

import csv
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_UNFINISHED = ".unfinished"


def write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}{_UNFINISHED}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_directory(path.parent)
    except OSError as exc:
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"{path} could not be written ({exc.strerror or exc}): what it held before is kept; "
            "make room or give another --save, then go on with --resume"
        ) from exc


def refuse_unwritable(folder: Path) -> None:
    """Before there is anything to lose: by a nameless file in `folder`, or in the nearest place above that is there."""
    try:
        places = (folder, *folder.absolute().parents)
        existing = next(place for place in places if place.exists() or place.is_symlink())
        if folder == existing and folder.is_file():
            raise FileExistsError(f"{folder} is a file, but a run needs a directory: give another --save")
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as exc:
        if exc.strerror is None:
            raise
        raise _unwritable(folder, exc) from exc


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise _unwritable(folder, exc) from exc


def _unwritable(folder: Path, exc: OSError) -> OSError:
    return OSError(f"nothing can be written to {folder} ({exc.strerror}): give another --save")


def remove_unfinished(folder: Path) -> None:
    """What a killed process was writing."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def table(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def tensors(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read_tensors(path: Path) -> Any:
    """What `torch.save` wrote, tensors and plain data only: no code in the file is run."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: give the folder of a run, or a file of weights in one") from None
    except Exception as exc:  # a damaged archive can fail in any way
        raise ValueError(
            f"{path} is truncated, damaged or not of tensors only ({type(exc).__name__}), and was left as it is: "
            "copy it again, or give another --save"
        ) from exc


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: give the folder of a run, which has one") from None
    except (ValueError, OSError) as exc:
        raise ValueError(f"{path} is damaged ({exc}): copy it again, or give another folder") from exc


def _flush_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
