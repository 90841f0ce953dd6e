"""What a run leaves on disk. Files are written beside their names and renamed: a reader sees the old or the new one."""

import csv
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def claim(folder: Path, overwrite: bool) -> Path:
    """Make the folder of a new run; one that holds a run already is left alone unless `overwrite` is given."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file, but a run needs a folder: give another --save")
    if (folder / "results.csv").exists() and not overwrite:
        raise FileExistsError(f"{folder} holds a run already: give --overwrite to start over, or another --save")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    rows = list(rows)

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="") as file:
            table = csv.DictWriter(file, fieldnames=list(rows[0]))
            table.writeheader()
            table.writerows(rows)

    _replace(path, write)


def save_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    _replace(path, lambda temporary: torch.save(dict(weights), temporary))


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, map_location="cpu", weights_only=True)


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
