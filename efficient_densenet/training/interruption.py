"""SIGINT and SIGTERM as a wish to stop after the step that is being computed."""

import signal
from types import FrameType, TracebackType


class Interruption:
    """While it is entered, `wanted` tells which signal came; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.wanted: signal.Signals | None = None

    def __enter__(self) -> "Interruption":
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.wanted is signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = signal.Signals(number)


class Stop(Exception):  # noqa: N818 - no error: somebody asked for it
    """Raised between two steps, where a run can be saved."""

    def __init__(self, number: int) -> None:
        self.number = number or signal.SIGTERM  # another process of the team was asked
        self.name = signal.Signals(self.number).name
