"""A function as a command: options from its arguments or from a dataclass, a sentence for what goes wrong."""

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
from typing import Any, get_args

from .._extras import need

EXPECTED = (ValueError, OSError, FloatingPointError, MemoryError, ModuleNotFoundError)


def command(function: Callable, options: type | None = None, about: str | None = None) -> None:
    """Run `function` on the command line's words; with a dataclass of `options`, on a dict of those that were given."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that measures memory would tell of itself
    called = _with_options(function, options, about or "") if options else function
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with _short_warnings():
            _refuse_unknown_words(called, sys.argv[1:])
            need("fire", extra="demos").Fire(_keeping_texts(called))
    except EXPECTED as exc:
        sys.exit(f"error: {_process()}{exc}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """What is worth a warning, without the line of code that it came from."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"note: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _with_options(function: Callable, options: type, about: str) -> Callable:
    def run(**given: Any) -> None:
        function(given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(
        inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
        for field in fields(options)
    )
    arguments = inspect.cleandoc(options.__doc__).partition("Args:\n")[2]
    run.__doc__ = f"{inspect.cleandoc(about)}\n\nArgs:\n{textwrap.indent(textwrap.dedent(arguments), '    ')}"
    return run


def _keeping_texts(function: Callable) -> Callable:
    """Texts stay as they were typed: fire would read run#2 as run, a,b as a pair and 1.50 as a number."""
    fire = need("fire", extra="demos")
    named = {}
    for parameter in inspect.signature(function).parameters.values():
        is_text = str in (parameter.annotation, *get_args(parameter.annotation))
        named[parameter.name] = _text if is_text else fire.parser.DefaultParseValue
    function = fire.decorators.SetParseFns(**named)(function)
    return fire.decorators.SetParseFn(_text)(function)  # words without a name: files


def _text(word: str) -> str | bool | None:
    """What was typed; an option without a value reaches here as True, and None stands for its absence."""
    return {"True": True, "False": False, "None": None}.get(word, word)


def _refuse_unknown_words(function: Callable, words: list[str]) -> None:
    """Before anything runs: fire itself would call the function first and complain afterwards."""
    parameters = inspect.signature(function).parameters
    takes_words = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    known = [name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    may_be_value = takes_words
    for word in words:
        if word in ("-h", "--help", "--"):
            continue
        if word.startswith("--") or (len(word) == 2 and word[0] == "-" and word[1].isalpha()):
            name, _, value = word.lstrip("-").partition("=")
            short = [option for option in known if len(word) == 2 and option.startswith(word[1])]
            if len(short) != 1:
                _refuse_unknown_option(name.replace("-", "_"), known)
            may_be_value = takes_words or not value
        elif may_be_value:
            may_be_value = takes_words
        else:
            hint = f"every option has a name: such as --{known[0]} {word}" if known else "there are no options"
            raise ValueError(f"found {word!r} on its own, but {hint}")


def _refuse_unknown_option(name: str, known: list[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean --{near[0]}?" if near else f"there are {', '.join(f'--{k}' for k in known) or 'none'}"
        raise ValueError(f"unknown option --{name}: {hint}")


def _process() -> str:
    """Which process of several found the error."""
    rank = os.environ.get("RANK")
    return f"process {rank} of {os.environ.get('WORLD_SIZE')}: " if rank is not None else ""
