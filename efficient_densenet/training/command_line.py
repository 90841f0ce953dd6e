"""A demo's function as a command: options from its arguments, a sentence for what goes wrong."""

import difflib
import inspect
import sys
from collections.abc import Callable

from ..extras import need

EXPECTED = (ValueError, FileExistsError, FloatingPointError, ModuleNotFoundError)


def command(component: Callable | dict[str, Callable]) -> None:
    """Run a function, or one of several by its name, on the command line's words."""
    words = sys.argv[1:]
    chosen = component.get(words[0]) if isinstance(component, dict) and words else component
    try:
        if callable(chosen):
            _refuse_unknown_options(chosen, words)
        need("fire", extra="demos").Fire(component)
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
