"""A function as a command: options from its arguments or from a dataclass, and errors as one sentence."""

import contextlib
import inspect
import io
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NoReturn

from efficient_densenet._extras import need

from .arguments import parse_words, wants_help
from .options import LETTERS, PAIR
from .report import say

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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path or a class may have characters that it lacks
    try:
        with _short_warnings():
            if wants_help(sys.argv[1:]):
                _show_help(called)
            by_name = {"pair": PAIR, "letters": LETTERS} if options else {}
            positional, named = parse_words(sys.argv[1:], called, **by_name)
            called(*positional, **named)
    except EXPECTED as exc:
        sys.exit(f"error: {_process()}{exc}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _show_help(function: Callable) -> NoReturn:
    """Fire's text on the standard output, so that it can be searched, without what Fire says of itself and of types."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
        need("fire", extra="demos").Fire(function, command=["--help"])
    lines = [line for line in text.getvalue().splitlines() if not line.strip().startswith(("INFO:", "Type:"))]
    say("\n".join(lines).strip())
    sys.exit(0)


def _open_standard_streams() -> None:
    """Discard what is printed to a closed descriptor: the next file to be opened would get its number and the text."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115


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


def _process() -> str:
    """Under torchrun, the process that reports the error."""
    rank = os.environ.get("RANK")
    return f"process {rank} of {os.environ.get('WORLD_SIZE')}: " if rank is not None else ""
