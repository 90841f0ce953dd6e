"""Notices that another process has died, stopped or lost its machine, within a minute.

Timeouts of the collectives of training do not tell: one process may work alone for long, such as on a download, while
the others wait for it. So a thread of each process meets those of the others every second, in a process group of its
own. It meets them whatever the process is at, but not where that has been stopped.
"""

import os
import sys
import threading
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

INTERVAL = 1.0
SILENCE = timedelta(seconds=40)
"""How long a process may not answer: libraries that compile hold Python's lock for seconds."""
GRACE = 10.0
"""Seconds in which the main thread may end by an error of its own, which says more."""


def lost_process(error: RuntimeError) -> str:
    return (
        f"lost another process ({str(error).splitlines()[0]}): its own error, above or below, is the cause; "
        "fix that, then continue with --resume"
    )


def _silent_process() -> str:
    return (
        f"lost another process: it did not answer for {SILENCE.seconds} seconds, so it was stopped, or its machine or "
        "network is lost; continue with --resume"
    )


class Heartbeat:
    """A context manager in which this process has the thread. All processes must enter it together.

    It ends once all processes end it, since who leaves looks dead to the others; at once after an error.
    """

    def __enter__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo", timeout=SILENCE)
        self._who = f"process {dist.get_rank()} of {dist.get_world_size()}"
        self._closing, self._failed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._failed = exc_type is not None
        self._closing.set()
        self._thread.join(GRACE if self._failed else None)

    def _run(self) -> None:
        try:
            while not self._failed and not self._all_are_closing():
                self._closing.wait(INTERVAL)
        except RuntimeError as exc:
            if not self._closing.wait(GRACE):
                sentence = _silent_process() if "Timed out" in str(exc) else lost_process(exc)
                print(f"error: {self._who}: {sentence}", file=sys.stderr, flush=True)
                os._exit(1)  # the main thread waits in a collective, which nothing interrupts

    def _all_are_closing(self) -> bool:
        closing = torch.tensor(int(self._closing.is_set()))
        dist.all_reduce(closing, group=self._group)
        return int(closing) == dist.get_world_size()
