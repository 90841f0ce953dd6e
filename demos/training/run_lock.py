"""One process at a time in the directory of a run: a lock on a file in it that ends with the process, however it ends.

A record lock (`fcntl.lockf`) belongs to the process: its forks do not keep it, and network file systems extend it to
all hosts. The file remains, since removing it could give two processes a lock each on files of the same name.

`filelock` promises less: it locks by `flock`, which forks share unless the library closes its file in them, as its
version 4 does. It tells neither who holds a lock since when, nor that its file was replaced during a run, nor that a
network file system shows the lock to no other host.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Any

LOCK = "run.lock"

_HELD = (errno.EACCES, errno.EAGAIN)
_SECONDS = 0.5
"""How long to try: another process that only asks whether the lock is held, holds it shared for a moment."""
_MOUNTS = Path("/proc/self/mountinfo")


class RunLock:
    """The lock on a run's directory, held from `acquire` until `close` or the end of this process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raise FileExistsError, with who holds it since when, if another process does."""
        _refuse_local_locks(self.path)
        deadline = time.monotonic() + _SECONDS
        while self._descriptor is None:
            descriptor = _open(self.path, os.O_CREAT)
            try:
                if not _try_lock(descriptor, fcntl.LOCK_EX, self.path):
                    if time.monotonic() > deadline:
                        raise _held(self.path)
                    time.sleep(_SECONDS / 10)
                elif _is_at(self.path, descriptor):
                    self._descriptor, descriptor = descriptor, None
            finally:
                if descriptor is not None:
                    os.close(descriptor)
        _write_holder(self._descriptor)

    def check(self) -> None:
        """Raise if the file was removed or replaced, since another process may then have locked another one."""
        if self._descriptor is not None and not _is_at(self.path, self._descriptor):
            raise FileNotFoundError(
                f"{self.path} was removed or replaced during the run, so that another run may write there: "
                "nothing more was saved; start again with another --save"
            )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def refuse_if_held(folder: Path) -> None:
    """Raise if another process has a run in `folder`; writes nothing."""
    path = folder / LOCK
    if not path.exists():
        return
    descriptor = _open(path)
    try:
        if not _try_lock(descriptor, fcntl.LOCK_SH, path):
            raise _held(path)
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int = 0) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
    except OSError as exc:
        raise OSError(f"{path} cannot be opened to lock it ({exc.strerror}): give another --save") from exc


def _try_lock(descriptor: int, kind: int, path: Path) -> bool:
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno in _HELD:
            return False
        raise _cannot_lock(path, str(exc.strerror)) from exc
    return True


def _cannot_lock(path: Path, reason: str) -> OSError:
    return OSError(
        f"{path} cannot be locked ({reason}), so that two runs could mix there: give a --save on another file system"
    )


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int) -> None:
    """For the message of a second run; the lock holds without it too."""
    since = datetime.now().astimezone().isoformat(" ", timespec="seconds")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    with contextlib.suppress(OSError):  # such as a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)


def _held(path: Path) -> FileExistsError:
    holder: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        holder = json.loads(path.read_bytes())
    try:
        who = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (KeyError, TypeError):  # it has just been locked
        who = "another process"
    return FileExistsError(
        f"{path.parent} is in use by {who}: wait until that run ends, or end it, or give another --save"
    )


def _refuse_local_locks(path: Path) -> None:
    """Raise on a network file system that was mounted so that other hosts do not see a lock."""
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:  # only Linux lists them there
        return
    device = os.stat(path.parent).st_dev
    for line in mounts:
        mount, _, source = line.partition(" - ")
        kind, *_, options = source.split()
        local = {"nolock", "local_lock=all", "local_lock=posix"} & set(options.split(","))
        if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}" and kind.startswith("nfs") and local:
            raise _cannot_lock(path, f"other hosts do not see it, since the mount has {min(local)}")
