"""A function as a command, by fire: options from its arguments or from a dataclass, and errors as one sentence."""

import inspect
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, get_args

from efficient_densenet._extras import need

EXPECTED = (ValueError, OSError, FloatingPointError, MemoryError, ModuleNotFoundError)
"""Errors that are reported as a sentence, without a traceback."""


def command(function: Callable, options: type | None = None, about: str | None = None) -> None:
    """Call `function` with the arguments of the command line.

    With a dataclass of `options` it gets those that were typed, and --help shows `about` and what the dataclass says.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler that measures memory
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path or a class may have characters that it lacks
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"  # without the line of code
    try:
        signature = inspect.signature(options or function)
        doc = options and (about or "") + inspect.cleandoc(options.__doc__ or "").partition("\n")[2]
        typed = _typed(signature, doc or function.__doc__)
        if options:  # those that are given by position are None where they are not
            function({name: value for name, value in typed.arguments.items() if (name, value) not in _NOT_GIVEN})
        else:
            function(*typed.args, **typed.kwargs)
    except EXPECTED as exc:
        process = "process {RANK} of {WORLD_SIZE}: ".format_map(os.environ) if "RANK" in os.environ else ""
        sys.exit(f"error: {process}{exc}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        warnings.formatwarning = usual


_NOT_GIVEN = [("data", None), ("save", None)]


def _typed(signature: inspect.Signature, doc: str | None) -> inspect.BoundArguments:
    """The arguments that fire takes from the command line; it refuses words that are none, and shows the help."""
    fire, calls = need("fire", extra="demos"), []

    def record(*positional: Any, **named: Any) -> None:
        calls.append(signature.bind(*positional, **named))

    kinds = {name: _kinds(each.annotation) for name, each in signature.parameters.items()}
    shown = [each.replace(annotation=kinds[name][-1]) for name, each in signature.parameters.items()]
    record.__doc__ = doc
    vars(record).update(__signature__=signature.replace(parameters=shown))
    fire.decorators.SetParseFn(_text)(record)
    others = [name for name, found in kinds.items() if str not in found]
    fire.decorators.SetParseFns(**dict.fromkeys(others, fire.parser.DefaultParseValue))(record)
    words = sys.argv[1:]
    fire.Fire(record, command=["--help"] if {"-h", "--help"} & set(words) else words)
    return calls[0]


def _kinds(annotation: Any) -> list[type]:
    """The plain types in an annotation such as `Annotated[int, …] | None`, but for None."""
    if get_args(annotation):
        return [kind for each in get_args(annotation) for kind in _kinds(each)]
    return [annotation] if annotation in (bool, int, float, str) else []


def _text(typed: str) -> str | bool | None:
    """A text as it was typed, be it run#2, 1.50 or a,b; True is what fire gives an option without a value."""
    return {"True": True, "False": False, "None": None}.get(typed, typed)
