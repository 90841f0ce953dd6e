"""A function as a command: options from its arguments or from a dataclass, and errors as one sentence."""

import contextlib
import difflib
import inspect
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any, get_args

from .._extras import need

EXPECTED = (ValueError, OSError, FloatingPointError, MemoryError, ModuleNotFoundError)
"""Errors that are reported as a sentence, without a traceback."""


def command(function: Callable, options: type | None = None, about: str | None = None) -> None:
    """Call `function` with the arguments of the command line.

    With a dataclass of `options`, it is called with a dict of the options that were given, and `about` is the
    description that --help shows.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler that measures memory
    called = _with_options(function, options, about or "") if options else function
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with _short_warnings():
            _refuse_unknown_arguments(called, sys.argv[1:])
            fire = need("fire", extra="demos")
            fire.Fire(_keep_strings(called, fire))
    except EXPECTED as exc:
        sys.exit(f"error: {_process()}{exc}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Show warnings without the line of code that they came from."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _with_options(function: Callable, options: type, about: str) -> Callable:
    def run(**given: Any) -> None:
        function(given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature(
        [
            inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
            for field in fields(options)
        ]
    )
    arguments = inspect.cleandoc(options.__doc__ or "").partition("Args:\n")[2]
    doc = f"{inspect.cleandoc(about)}\n\nArgs:\n{textwrap.indent(textwrap.dedent(arguments), '    ')}"
    vars(run).update(__signature__=signature)
    run.__doc__ = doc
    return run


def _keep_strings(function: Callable, fire: ModuleType) -> Callable:
    """Have fire leave strings as typed: it would parse run#2 as run, a,b as a tuple and 1.50 as a number."""
    fire.decorators.FIRE_METADATA = "_fire_metadata"  # the attribute that it sets: --help lists public ones as groups
    named = {}
    for parameter in inspect.signature(function).parameters.values():
        is_string = str in (parameter.annotation, *get_args(parameter.annotation))
        named[parameter.name] = _string if is_string else fire.parser.DefaultParseValue
    function = fire.decorators.SetParseFns(**named)(function)
    return fire.decorators.SetParseFn(_string)(function)  # positional arguments


def _string(argument: str) -> str | bool | None:
    """The argument as typed; fire passes "True" for an option without a value, and "None" stands for its absence."""
    return {"True": True, "False": False, "None": None}.get(argument, argument)


def _refuse_unknown_arguments(function: Callable, arguments: list[str]) -> None:
    """Raise before anything runs: fire itself would call the function first and complain afterwards."""
    parameters = inspect.signature(function).parameters
    takes_positional = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    known = [name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    may_be_value = takes_positional
    for argument in arguments:
        if argument in ("-h", "--help", "--"):
            continue
        if argument.startswith("--") or (len(argument) == 2 and argument[0] == "-" and argument[1].isalpha()):
            name, _, value = argument.lstrip("-").partition("=")
            short = [option for option in known if len(argument) == 2 and option.startswith(argument[1])]
            if len(short) != 1:
                _refuse_unknown_option(name.replace("-", "_"), known)
            may_be_value = takes_positional or not value
        elif may_be_value:
            may_be_value = takes_positional
        else:
            hint = f"every option has a name: such as --{known[0]} {argument}" if known else "there are no options"
            raise ValueError(f"found {argument!r} on its own, but {hint}")


def _refuse_unknown_option(name: str, known: list[str]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean --{close[0]}?" if close else f"there are {', '.join(f'--{k}' for k in known) or 'none'}"
        raise ValueError(f"unknown option --{name}: {hint}")


def _process() -> str:
    """Under torchrun, the process that reports the error."""
    rank = os.environ.get("RANK")
    return f"process {rank} of {os.environ.get('WORLD_SIZE')}: " if rank is not None else ""
