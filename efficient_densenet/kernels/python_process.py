"""Python processes that run one function of this package: a kernel that aborts there harms no training."""

import logging
import os
import sys

logger = logging.getLogger(__name__.partition(".")[0])
"""The package's logger. It says at the level of warnings what takes long, since Python shows these by default."""

_START = """
import sys
sys.path[:] = sys.argv.pop(1).split("\\n")
from {module} import main
main(*sys.argv[1:])
"""


def command(module: str, *arguments: str) -> list[str]:
    """The command that calls `main` of the module with the arguments.

    Its modules are this process's own, from its own paths, which the working directory need not be among.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("there is no Python interpreter to start, as in a frozen application")
    return [sys.executable, "-c", _START.format(module=module), "\n".join(sys.path), *arguments]


def num_processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
