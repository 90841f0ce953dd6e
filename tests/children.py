"""Functions in child processes that are forks of the test's: they have everything imported."""

import os
import signal
import traceback
import warnings
from collections.abc import Callable

import torch


class Child:
    """A fork that runs the function with one PyTorch thread, and ends with what it returns as its exit status."""

    def __init__(self, function: Callable[[], int | None], timeout: int = 60) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of threads that the child does not use
            self.pid = os.fork()
        if self.pid == 0:
            self._run(function, timeout)

    def wait(self) -> int:
        """Its exit status, negative where a signal ended it: -14 after the timeout. 99 says that it raised."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _run(self, function: Callable[[], int | None], timeout: int) -> None:
        status = 99
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(timeout)
            torch.set_num_threads(1)
            status = function() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def in_child(function: Callable[[], int | None]) -> int:
    return Child(function).wait()
