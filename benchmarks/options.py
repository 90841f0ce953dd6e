"""A benchmark's function as a command, with fire where it is installed and without it on a bare GPU machine."""

import argparse
import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

from efficient_densenet.training.command_line import EXPECTED, command


def start(function: Callable) -> None:
    if importlib.util.find_spec("fire"):
        command(function)
        return
    print("fire is not installed: options are read by argparse")
    try:
        words, options = read(function, sys.argv[1:])
        function(*words, **options)
    except EXPECTED as exc:
        sys.exit(f"error: {exc}")


def read(function: Callable, words: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """A function's arguments from a command line: the words that belong to no option, and the options."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(function))
    listed = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            listed.append(name)
            parser.add_argument(name, nargs="*")
        else:
            parser.add_argument(f"--{name}", default=parameter.default, type=_value)
    options = vars(parser.parse_args(words))
    return [word for name in listed for word in options.pop(name)], options


def _value(word: str) -> Any:
    """As fire reads it: a number, a tuple or True where the word is one, otherwise the word."""
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word
