"""SIGINT and SIGTERM as a request to stop after the current step."""

import signal
from types import FrameType, TracebackType


class StopRequest:
    """A context manager in which `signal` is the signal received; a second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal is signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


class TrainingInterrupted(Exception):  # noqa: N818 - a request, not an error
    """Raised between two steps, where a run can be saved.

    `number` is the signal that this process received; 0 if another process of the group received one.
    """

    def __init__(self, number: int) -> None:
        self.number = number or int(signal.SIGTERM)
        self.name = signal.Signals(self.number).name
