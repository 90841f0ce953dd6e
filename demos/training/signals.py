"""SIGINT and SIGTERM as a request to stop after the current step."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """The signal that was `received` while it is `listening`, or 0; a second Ctrl-C raises KeyboardInterrupt."""

    received: int = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


class TrainingInterrupted(Exception):  # noqa: N818 - a request, not an error
    """Raised between two steps, where a run can be saved, with the signal that this or another process received."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number or signal.SIGTERM)
