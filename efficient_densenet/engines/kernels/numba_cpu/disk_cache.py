"""Compiled kernels on disk: a file for each, which is used only if it is whole and no other user may write it.

Numba chooses the place (`NUMBA_CACHE_DIR`, `__pycache__`, or the user's cache directory) and says what a compiled
kernel consists of. Numba's own files are pickles without a checksum: damage raises errors for ever, and a file in
another's place ends the process. Here a file is a checksum of the key and the content, then the content. The key holds
everything that the machine code depends on. `KernelCache` needs `numba.core.caching` as Numba 0.57 to 0.68 have it.
"""

import contextlib
import functools
import hashlib
import importlib.resources
import os
import pickle
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import FunctionCache, NullCache
from numba.core.serialize import dumps

from .processor import features

FILES_PER_KERNEL = 16
"""So many files of a kernel stay, those used last: for each dtype, kind of processor and version that shares them."""

_CHECKSUM_BYTES = hashlib.sha256().digest_size
_ABANDONED_AFTER = 3600  # seconds: no process writes a temporary file for so long


def open_cache(function: Callable) -> "KernelCache | NullCache":
    """The function's cache, or one that holds nothing where Numba can write nowhere or other users can."""
    try:
        cache = KernelCache(function)
    except RuntimeError:  # Numba finds no directory that it can write
        return NullCache()
    return NullCache() if cache.directory is None else cache


class KernelCache(FunctionCache):
    """One function's compiled kernels. A file that cannot be used counts as missing, and is replaced as a whole."""

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        self.function = function
        self.directory = _private_directory(os.path.abspath(self.cache_path))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        key = self._key(sig, target_context.codegen())
        content = _read(self._file(key))
        checksum, data = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if checksum != _checksum(key, data):
            return None
        with contextlib.suppress(OSError):
            os.utime(self._file(key))
        try:
            return self._impl.rebuild(target_context, pickle.loads(data))
        except Exception:  # whatever differs from when it was written
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if not self._impl.check_cachable(data):
            return
        key, content = self._key(sig, data.codegen), dumps(self._impl.reduce(data))
        with contextlib.suppress(OSError):  # the disk is full, for example: the next process compiles again
            _replace(self._file(key), _checksum(key, content) + content)
            _remove_old_files(self._file(key).parent, self.function.__name__)

    def _key(self, sig: Any, codegen: Any) -> bytes:
        versions = numba.__version__, llvmlite.__version__, sys.implementation.cache_tag, sys.abiflags
        name = self.function.__module__, self.function.__qualname__
        return repr((versions, _hash_of_sources(), name, str(sig), codegen.magic_tuple(), features())).encode()

    def _file(self, key: bytes) -> Path:
        assert self.directory is not None
        return self.directory / f"{self.function.__name__}-{hashlib.sha256(key).hexdigest()[:32]}.kernel"


@functools.cache
def _hash_of_sources() -> str:
    """Of all files of this folder: a kernel calls functions from many of them."""
    folder = importlib.resources.files(__name__.rpartition(".")[0])
    sources = sorted((file.name, file.read_bytes()) for file in folder.iterdir() if file.name.endswith(".py"))
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def _checksum(key: bytes, data: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(key).digest() + data).digest()


@functools.cache
def _private_directory(cache_path: str) -> Path | None:
    """This user's own directory in Numba's, which others may be able to write; None where it cannot be had."""
    directory = Path(cache_path, f"kernels-{os.geteuid()}")
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
    try:
        status = directory.lstat()
    except OSError:
        return None
    if stat.S_ISDIR(status.st_mode) and _is_private(status):
        return directory
    _warn(f"{directory} {_permissions(status)}: kernels are compiled without it, in every process")
    return None


def _read(file: Path) -> bytes:
    """The file's bytes, or none where it is missing, unreadable or such that other users may have written it."""
    try:
        with open(file, "rb", opener=_open_regular) as opened:
            status = os.fstat(opened.fileno())
            if _is_private(status):
                return opened.read()
    except OSError:
        return b""
    _warn(f"{file} {_permissions(status)}: the kernel is compiled again")
    return b""


def _open_regular(path: str, flags: int) -> int:
    """No symbolic link, and not a FIFO, which would wait for a writer."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(f"{path} is no regular file")
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _permissions(status: os.stat_result) -> str:
    return (
        f"is a {stat.filemode(status.st_mode)} of user {status.st_uid}, where one is needed that user {os.geteuid()} "
        "alone may write"
    )


def _warn(found: str) -> None:
    warnings.warn(f"{found}. Remove it, or set NUMBA_CACHE_DIR to a directory of your own", stacklevel=3)


def _replace(file: Path, content: bytes) -> None:
    """Write a temporary file that takes the file's place when it is whole. Its mode is 0o600."""
    descriptor, temporary = tempfile.mkstemp(".tmp", dir=file.parent)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(content)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _remove_old_files(directory: Path, name: str) -> None:
    """Remove what a kernel was long ago, and what processes that were killed have left."""
    by_use = sorted(directory.glob(f"{name}-*.kernel"), key=_modified, reverse=True)
    abandoned = (file for file in directory.glob("*.tmp") if _modified(file) < time.time() - _ABANDONED_AFTER)
    for file in (*by_use[FILES_PER_KERNEL:], *abandoned):
        file.unlink(missing_ok=True)


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # another process has just removed it
        return time.time()
