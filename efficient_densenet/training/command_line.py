"""A demo's function as a command: options from its arguments, a sentence for what goes wrong."""

import difflib
import inspect
import sys
from collections.abc import Callable

from ..extras import need

EXPECTED = (ValueError, FileExistsError, FloatingPointError, ModuleNotFoundError)


def command(function: Callable) -> None:
    try:
        _refuse_unknown_options(function, sys.argv[1:])
        need("fire", extra="demos").Fire(function)
    except EXPECTED as exc:
        sys.exit(f"error: {exc}")


def _refuse_unknown_options(function: Callable, words: list[str]) -> None:
    """Before anything runs: fire itself would call the function first and complain afterwards."""
    known = [*inspect.signature(function).parameters, "help"]
    for word in words:
        name = word[2:].split("=")[0].replace("-", "_")
        if word.startswith("--") and name and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean --{near[0]}?" if near else f"there are {', '.join(f'--{k}' for k in known)}"
            raise ValueError(f"unknown option --{name}: {hint}")
