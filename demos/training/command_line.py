"""A function as a command, through fire: options from its arguments or from a dataclass, and errors as one sentence.

Fire takes words apart and shows help. What it lets through, or calls the function before it refuses, is refused here:
an option of another name, a word without one, a string turned into a number.
"""

import ast
import contextlib
import difflib
import inspect
import io
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, get_args

from efficient_densenet._extras import need

from .options import LETTERS, PAIR, SWITCH
from .report import say

EXPECTED = (ValueError, OSError, FloatingPointError, MemoryError, ModuleNotFoundError)
"""Errors that are reported as a sentence, without a traceback."""
Parameters = Mapping[str, inspect.Parameter]


def command(function: Callable, options: type | None = None, about: str | None = None) -> None:
    """Call `function` with the arguments of the command line.

    With a dataclass of `options`, it is called with a dict of the options that were given, and `about` is the
    description that --help shows.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler that measures memory
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path or a class may have characters that it lacks
    words = sys.argv[1:]
    try:
        with _short_warnings():
            if not {"-h", "--help"}.isdisjoint(words):  # anywhere, after other options and after their values
                _show_help(_with_options(options, about or "") if options else function)
            elif options:
                function(_parse_options(words, inspect.signature(options).parameters, PAIR, LETTERS))
            else:
                positional, named = _parse(words, inspect.signature(function).parameters)
                function(*positional, **named)
    except EXPECTED as exc:
        sys.exit(f"error: {_process()}{exc}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _parse_options(
    words: Sequence[str], parameters: Parameters, pair: tuple[str, str], letters: Mapping[str, str]
) -> dict[str, Any]:
    """The options in `words`, of which a `pair` may be given by position together."""
    positional, named = _split(words, parameters, letters)
    if len(positional) == 2 and not {*pair} & named.keys():
        return dict(zip(pair, positional, strict=True)) | named
    _refuse_positional(positional, pair[0])
    return named


def _parse(words: Sequence[str], parameters: Parameters) -> tuple[list[str], dict[str, Any]]:
    """The positional and the named arguments in `words`."""
    options = {name: each for name, each in parameters.items() if each.kind is not each.VAR_POSITIONAL}
    positional, named = _split(words, options, {})
    if len(options) == len(parameters):
        _refuse_positional(positional, next(iter(options), None))
    return positional, named


def _refuse_positional(words: list[str], example: str | None) -> None:
    if words:
        hint = f"every option has a name: such as --{example} {words[-1]}" if example else "there are no options"
        raise ValueError(f"found {words[-1]!r} on its own, but {hint}")


def _split(words: Sequence[str], options: Parameters, letters: Mapping[str, str]) -> tuple[list[str], dict[str, Any]]:
    """The words that belong to no option, and the values of the options, by their full names."""
    fire = need("fire", extra="demos")
    positional: list[str] = []
    typed: dict[str, str] = {}

    def collect(*some: str, **others: str) -> None:
        positional.extend(some)
        typed.update(others)

    some, others = inspect.signature(collect).parameters.values()
    known = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in options.values()]
    vars(collect).update(__signature__=inspect.Signature([some, *known, others]))
    for parse_as_text in (fire.decorators.SetParseFn(str), fire.decorators.SetParseFns(**dict.fromkeys(options, str))):
        parse_as_text(collect)
    fire.Fire(collect, command=[*(word for word in words if word != "--"), "--", "--separator=\0"])
    named = {_full_name(name, options, letters): text for name, text in typed.items()}
    return positional, {name: _value(name, text, options[name].annotation) for name, text in named.items()}


def _full_name(name: str, options: Parameters, letters: Mapping[str, str]) -> str:
    """The option that a name or a letter stands for; a letter stands for the only option that it begins."""
    name = letters.get(name, name.lstrip("_"))  # as fire leaves it of --no-resume
    if name in options:
        return name
    typed = f"-{name}" if len(name) == 1 else f"--{name}"
    matching = [option for option in options if option.startswith(name)] if len(name) == 1 else []
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ValueError(f"{typed} could be {' or '.join(f'--{each}' for each in matching)}: give the whole name")
    close = difflib.get_close_matches(name, options, n=1)
    listed = ", ".join(f"--{each}" for each in options) or "none"
    raise ValueError(f"unknown option {typed}: {f'did you mean --{close[0]}?' if close else f'there are {listed}'}")


def _value(name: str, text: str, annotation: Any) -> Any:
    """The value of an option. A string stays as it was typed, be it run#2, 1.50 or a,b."""
    kinds = {annotation, *get_args(annotation)}
    if bool in kinds and text in SWITCH and (str not in kinds or text in ("True", "False")):
        return SWITCH[text]
    if text == "None" and (type(None) in kinds or str not in kinds):
        return None
    if str in kinds:
        if text in ("True", "False"):  # what fire gives an option without a value
            raise ValueError(f"--{name} needs a value: give --{name} VALUE")
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _show_help(function: Callable) -> NoReturn:
    """Fire's text on the standard output, so that it can be searched, without what Fire says of itself and of types."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
        need("fire", extra="demos").Fire(function, command=["--help"])
    lines = [line for line in text.getvalue().splitlines() if not line.strip().startswith(("INFO:", "Type:"))]
    say("\n".join(lines).strip())
    sys.exit(0)


def _with_options(options: type, about: str) -> Callable:
    """A function whose help is `about`, and what the dataclass says of each option."""

    def run() -> None:
        """Described below."""

    parameters = inspect.signature(options).parameters.values()
    signature = inspect.Signature([each.replace(kind=each.KEYWORD_ONLY) for each in parameters])
    arguments = inspect.cleandoc(options.__doc__ or "").partition("Args:\n")[2]
    run.__doc__ = f"{inspect.cleandoc(about)}\n\nArgs:\n{textwrap.indent(textwrap.dedent(arguments), '    ')}"
    vars(run).update(__signature__=signature)
    return run


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


def _process() -> str:
    """Under torchrun, the process that reports the error."""
    rank = os.environ.get("RANK")
    return f"process {rank} of {os.environ.get('WORLD_SIZE')}: " if rank is not None else ""
