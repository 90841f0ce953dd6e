"""Run a benchmark's function as a command: with fire if it is installed, otherwise with argparse."""

import argparse
import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

from training.command_line import EXPECTED, command


def run_command(function: Callable) -> None:
    """Call `function` with the arguments of the command line."""
    if importlib.util.find_spec("fire"):
        command(function)
        return
    print("fire is not installed: options are parsed by argparse")
    try:
        positional, options = parse_arguments(function, sys.argv[1:])
        function(*positional, **options)
    except EXPECTED as exc:
        sys.exit(f"error: {exc}")


def parse_arguments(function: Callable, argv: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Parse `argv` by the signature of `function`; return its positional arguments, and its options by name."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(function))
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
    """Parse a value as fire does: a Python literal such as a number, a tuple or True, otherwise a string."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
