"""Files that are written whole or not at all, and what is wrong with a file that cannot be read."""

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from efficient_densenet.weights.source import load_archive


def write_atomic(path: Path, content: bytes) -> None:
    """Write to a temporary file that is flushed to disk and renamed, so that a reader never sees a part."""
    temporary = path.with_name(f".{path.name}.unfinished")
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


def saved_bytes(content: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def load_torch(path: Path) -> Any:
    """Load tensors and plain data that `torch.save` wrote: no code in the file is run."""
    with damage_named(path):
        return load_archive(path)


def load_json(path: Path) -> Any:
    with damage_named(path):
        return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Raise what reading the content of `path` raises as a sentence: a damaged file can fail in any way."""
    try:
        yield
    except MemoryError:
        raise
    except OSError as exc:
        raise OSError(f"{path} cannot be read ({exc.strerror or exc}): restore it, or give another run") from exc
    except Exception as exc:
        reason = " ".join(str(exc).split())[:300]
        if not isinstance(exc, (ValueError, zipfile.BadZipFile)):
            reason = f"{type(exc).__name__}: {reason}"
        raise ValueError(
            f"{path} is truncated, damaged or not what a run of these demos writes ({reason}), and was left unchanged: "
            "restore it from a copy, or give another run"
        ) from exc
