"""Run a benchmark's function as a command, by the standard library: a machine with a GPU may have torch alone."""

import argparse
import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any

EXPECTED = (ValueError, OSError, RuntimeError, ImportError)
"""Exceptions whose message a command prints without a traceback."""


def run_command(function: Callable[..., object]) -> None:
    """Call `function` with the arguments of the command line."""
    positional, options = parse_arguments(function, sys.argv[1:])
    try:
        function(*positional, **options)
    except EXPECTED as exc:
        sys.exit(f"error: {exc}")


def parse_arguments(function: Callable[..., object], argv: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Parse `argv` by the signature of `function`; return its positional arguments, and its options by name."""
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(function), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    positional = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional.append(name)
            parser.add_argument(name, nargs="*")
        else:
            flag: dict[str, Any] = {"nargs": "?", "const": True} if isinstance(parameter.default, bool) else {}
            parser.add_argument(f"--{name}", default=parameter.default, type=_value, **flag)
    options = vars(parser.parse_args(argv))
    return [value for name in positional for value in options.pop(name)], options


def _value(text: str) -> Any:
    """A Python literal such as a number, a tuple or True, otherwise the text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
