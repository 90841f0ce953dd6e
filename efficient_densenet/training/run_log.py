"""The log of a run: a line in log.txt for each time that it was begun, resumed, stopped or finished."""

import os
from datetime import datetime, timezone
from pathlib import Path

from .report import may_fail

LOG = "log.txt"


def append(folder: Path, event: str) -> None:
    """Add a line with the time, in one write. Where that fails, the run goes on: nothing reads the log."""
    line = f"{datetime.now(timezone.utc).isoformat(timespec='seconds')} {event}\n"
    with may_fail(LOG):
        # O_NONBLOCK: a pipe of that name, which nobody may ever read, fails at once.
        descriptor = os.open(folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
