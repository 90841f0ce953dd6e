"""A function as a command, by fire: its options from a dataclass, and errors as one sentence."""

import difflib
import inspect
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from efficient_densenet._extras import need

EXPECTED = (ValueError, OSError, FloatingPointError, MemoryError, ModuleNotFoundError)
"""Errors that are reported as a sentence, without a traceback."""


def command(function: Callable, options: type, about: str | None) -> None:
    """Call `function` with a dict of the options that were typed. --help shows `about` and what `options` says."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # a path may have any characters
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"  # without the line of code
    try:
        doc = (about or "") + inspect.cleandoc(options.__doc__ or "").partition("\n")[2]
        given = _typed(options, doc)
        # Options that are also given by their position are None where they are not given.
        absent = [name for name in ("data", "save") if given[name] is None]
        function({name: value for name, value in given.items() if name not in absent})
    except BrokenPipeError:  # nobody reads any more, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter would fail to flush as it ends
        sys.exit(1)
    except EXPECTED as exc:
        process = "process {RANK} of {WORLD_SIZE}: ".format_map(os.environ) if "RANK" in os.environ else ""
        sys.exit(f"error: {process}{exc}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _typed(options: type, doc: str) -> dict[str, Any]:
    """The options on the command line."""
    fire, calls, signature = need("fire", extra="demos"), [], inspect.signature(options)
    hints = get_type_hints(options)  # without what `Annotated` adds

    def record(*positional: Any, **named: Any) -> None:
        calls.append(signature.bind(*positional, **named).arguments)

    kinds = {
        name: [kind for kind in get_args(hint) or [hint] if kind is not type(None)] for name, hint in hints.items()
    }
    shown = [each.replace(annotation=kinds[name][-1]) for name, each in signature.parameters.items()]
    record.__doc__ = doc
    vars(record).update(__signature__=signature.replace(parameters=shown))
    fire.decorators.SetParseFn(_text)(record)
    others = [name for name in signature.parameters if str not in kinds[name]]
    fire.decorators.SetParseFns(**dict.fromkeys(others, fire.parser.DefaultParseValue))(record)
    words = [_own_word(word, list(signature.parameters)) for word in sys.argv[1:]]
    fire.Fire(record, command=["--help"] if {"-h", "--help"} & set(words) else words)
    return calls[0]


ALIASES = {"epochs": "n_epochs", "learning_rate": "lr", "out": "save", "precision": "amp"}
"""The words of the examples for options of the demos."""


def _own_word(word: str, names: list[str]) -> str:
    """The word with the demos' name of the option; ValueError for an option that they do not have."""
    typed, equals, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or typed in ("", "help"):
        return word
    name = ALIASES.get(typed, typed.replace("-", "_"))
    if name not in names and name.removeprefix("no") not in names:
        near = difflib.get_close_matches(name, [*names, *ALIASES], n=1)
        raise ValueError(f"unknown option {word!r}: {f'did you mean --{near[0]}' if near else 'see --help'}")
    return f"--{name}{equals}{value}"


def _text(typed: str) -> str | bool | None:
    """A text as it was typed, be it run#2, 1.50 or a,b; True is what fire gives an option without a value."""
    return {"True": True, "False": False, "None": None}.get(typed, typed)
