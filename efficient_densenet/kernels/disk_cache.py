"""Files of compiled kernels and of verdicts on kernels, in a directory that no other user may write.

The directory is inside `NUMBA_CACHE_DIR` where that is set, otherwise in the user's cache directory. A file is a
checksum of the key and the content, then the content; one that is damaged is not used. The key contains everything on
which the content depends.
"""

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import time
import warnings
from pathlib import Path

KEPT_SECONDS = 90 * 24 * 3600
"""Files that nobody used for this time are removed: those of other versions, and temporary ones of killed processes."""

_CHECKSUM_BYTES = hashlib.sha256().digest_size


def load(name: str, key: bytes) -> bytes | None:
    """The content stored for this key of the kernel `name`; None if there is no undamaged file."""
    private = directory()
    if private is None:
        return None
    file = _file(private, name, key)
    try:
        stored = file.read_bytes()
    except OSError:
        return None
    checksum, content = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
    if checksum != _checksum(key, content):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    return content


def store(name: str, key: bytes, content: bytes) -> None:
    """Write the file atomically. If it cannot be written, the next process compiles the kernel again."""
    private = directory()
    if private is not None:
        with contextlib.suppress(OSError):
            _replace(_file(private, name, key), _checksum(key, content) + content)
            for file in private.iterdir():
                if file.stat().st_mtime < time.time() - KEPT_SECONDS:
                    file.unlink(missing_ok=True)


def directory() -> Path | None:
    """The directory of the files; None if there is none that this user alone may write."""
    return _private_directory(_directory())


def _directory() -> Path | None:
    """This user's own directory, inside a directory that other users may be able to write. It is None without a home,
    or without users as Unix has them."""
    if not hasattr(os, "geteuid"):
        return None
    try:
        caches = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(os.path.abspath(caches), f"efficient_densenet-{os.geteuid()}")


@functools.cache
def _private_directory(directory: Path | None) -> Path | None:
    """The directory, created if it is missing; None if it cannot be created or other users may write it."""
    if directory is None:
        return None
    with contextlib.suppress(OSError):
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    try:
        status = directory.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if is_own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return directory
    warnings.warn(
        f"{directory} is a {stat.filemode(status.st_mode)} of user {status.st_uid}, where a directory is needed that "
        f"user {os.geteuid()} alone may write: kernels are compiled without it, in every process. Remove it, or set "
        "NUMBA_CACHE_DIR to a directory of your own",
        stacklevel=2,
    )
    return None


def _file(directory: Path, name: str, key: bytes) -> Path:
    return directory / f"{name}-{hashlib.sha256(key).hexdigest()[:32]}.kernel"


def _checksum(key: bytes, content: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(key).digest() + content).digest()


def _replace(file: Path, content: bytes) -> None:
    """Write a temporary file of mode 0o600 and rename it to `file` when it is complete."""
    descriptor, temporary = tempfile.mkstemp(".tmp", dir=file.parent)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(content)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
