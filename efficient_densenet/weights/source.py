"""Reading a state dict from a file, or from a dict that may have other content too."""

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._extras import need

Source = str | os.PathLike | Mapping[str, Any]

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model_state", "model", "state", "weights")
"""The keys of a checkpoint under which training programs save the model's state dict, in order of preference."""

_MAX_NAMES = 30

_DIRECTORY = 0x10
"""The attribute of a directory record. PyTorch reads no data for such a record and returns uninitialized memory."""


def read_state_dict(source: Source) -> Mapping[str, Any]:
    """Return the model's state dict in a file, or in a dict that may have other content too."""
    content: Any = source
    if not isinstance(source, Mapping):
        path, load = Path(source), partial[Any](torch.load, map_location="cpu", weights_only=True)
        if not path.is_file():
            raise ValueError(f"{path} is no file: give one that torch.save or safetensors wrote")
        if path.suffix == ".safetensors":
            need("safetensors", extra="weights")
            load = need("safetensors.torch", extra="weights").load_file
        elif zipfile.is_zipfile(path):  # files of early PyTorch versions are no ZIP archives and have no checksums
            load = load_archive
        try:
            content = load(path)
        except Exception as exc:  # a damaged archive raises errors of any type
            reason = str(exc) if isinstance(exc, zipfile.BadZipFile) else type(exc).__name__
            raise ValueError(
                f"{path} is truncated, damaged or contains more than tensors ({reason}): copy it again, or "
                "save the model's state_dict() alone"
            ) from None
    state_dict = _find_state_dict(content)
    if state_dict is None:
        keys = f", but {join_names(list(map(str, content)))}" if isinstance(content, Mapping) and content else ""
        raise ValueError(
            f"{source_name(source)} holds no tensors by name{keys}: give a model's state dict, or a dict with one "
            f"inside as {', '.join(map(repr, STATE_DICT_KEYS))}"
        )
    return state_dict


def is_array(value: Any) -> bool:
    """Return True for a tensor, or an array that can become one."""
    return isinstance(value, Tensor) or hasattr(value, "__array__")


def source_name(source: Source) -> str:
    """Return the name of `source` for a message."""
    return "the dict" if isinstance(source, Mapping) else str(source)


def join_names(names: Sequence[str]) -> str:
    """Join names for a message, at most 30 of them."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _find_state_dict(value: Any) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    nested = (_find_state_dict(value.get(key)) for key in STATE_DICT_KEYS)
    is_state_dict = any(map(is_array, value.values())) and all(isinstance(key, str) for key in value)
    return next((state_dict for state_dict in nested if state_dict is not None), value if is_state_dict else None)


def load_archive(path: Path) -> Any:
    """Load tensors and plain data; raises zipfile.BadZipFile where a checksum is wrong.

    An archive without checksums is from PyTorch after `set_crc32_options(False)`.
    """
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = archive.infolist()
        if any(record.CRC for record in records):
            directories = [record.filename for record in records if record.external_attr & _DIRECTORY]
            if directories:
                raise zipfile.BadZipFile(f"its record {directories[0]} says that it is a directory")
            try:
                damaged = archive.testzip()
            except (RuntimeError, NotImplementedError) as exc:  # a record marked as encrypted or of another version
                raise zipfile.BadZipFile(str(exc)) from exc
            if damaged is not None:
                raise zipfile.BadZipFile(f"the checksum of its record {damaged} is wrong")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
