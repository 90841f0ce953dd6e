"""The log of a run: a line in run_log.txt for each time that it was started, resumed, stopped or finished."""

from datetime import datetime, timezone
from pathlib import Path

from . import files
from .report import may_fail

LOG = "run_log.txt"


def append(folder: Path, event: str) -> None:
    """Add a line with the time in UTC. Where that fails, the run goes on: nothing reads the log."""
    path, line = folder / LOG, f"{datetime.now(timezone.utc).isoformat(timespec='seconds')} {event}\n"
    with may_fail(LOG):
        lines = path.read_bytes() if path.is_file() else b""
        files.write_atomic(path, lines + line.encode())
