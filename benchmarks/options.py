"""Run a benchmark's function as a command, by the standard library: a machine with a GPU may have torch alone.

python benchmarks/options.py benchmarks/gpu_tiles.py --precision bf16     imports it and parses its options, no more
"""

import argparse
import ast
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

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


def parse_only(words: list[str]) -> None:
    """Run a Python command, a file or -m and a module, until it has parsed its options (a demo: and checked them)."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "demos"))
    parse_args = argparse.ArgumentParser.parse_args

    def then_stop(*arguments: Any) -> None:
        parse_args(*arguments)
        sys.exit()

    sys.argv = words[1:] if words[0] == "-m" else words
    run = runpy.run_module if words[0] == "-m" else runpy.run_path
    with mock.patch.object(argparse.ArgumentParser, "parse_args", then_stop):
        if "cp_demo.py" in words[0]:
            training, parse = importlib.import_module("training"), importlib.import_module("training.options").parse
            training.train = lambda given: parse(given, "best")
        run(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    parse_only(sys.argv[1:])
