"""The words of a command line as arguments of a function; what cannot be understood is refused as it was typed."""

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

_HELP = {"-h", "--help"}
SWITCH = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}
_OPTION = re.compile("--|-[a-zA-Z]")  # and no negative number


def wants_help(words: Sequence[str]) -> bool:
    """Help may stand anywhere, after other options and after their values."""
    return not _HELP.isdisjoint(words)


def parse_words(
    words: Sequence[str],
    function: Callable,
    pair: tuple[str, str] | None = None,
    letters: Mapping[str, str] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the named arguments that `words` give to `function`.

    Args:
        words: what was typed.
        function: its signature says which options there are, and which of them are strings or switches.
        pair: two options that may be given together by position, without their names.
        letters: options that a single letter stands for; any other letter stands for the only option that it begins.
    """
    parameters = inspect.signature(function).parameters
    options = {name: p for name, p in parameters.items() if p.kind is not p.VAR_POSITIONAL}
    positional, named = _split([word for word in words if word != "--"], options, letters or {})
    values = {name: _value(text, options[name].annotation) for name, text in named.items()}
    if len(options) < len(parameters):
        return positional, values
    if pair and len(positional) == 2 and not {*pair} & values.keys():
        return [], dict(zip(pair, positional, strict=True)) | values
    if positional:
        found, example = positional[-1], pair[0] if pair else next(iter(options), None)
        hint = f"every option has a name: such as --{example} {found}" if options else "there are no options"
        raise ValueError(f"found {found!r} on its own, but {hint}")
    return [], values


def _split(
    words: list[str], options: dict[str, inspect.Parameter], letters: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The words that are no options, and the text of each option: "True" for a switch alone, "False" if negated."""
    positional: list[str] = []
    named: dict[str, str] = {}
    remaining = iter(enumerate(words))
    for i, word in remaining:
        if not _OPTION.match(word):
            positional.append(word)
            continue
        typed, equals, text = word.partition("=")
        name, negated = _option(typed, options, letters)
        has_value = bool(equals) or (i + 1 < len(words) and not _OPTION.match(words[i + 1]))
        if negated and has_value:
            found = text if equals else words[i + 1]
            raise ValueError(f"found {found!r} after {typed}, which takes no value: give --{name} {found}, or {typed}")
        if not has_value and not _is_switch(options[name].annotation):
            raise ValueError(f"{typed} needs a value: give {typed} VALUE")
        if has_value and not equals:
            text = next(remaining)[1]
        named[name] = text if has_value else str(not negated)
    return positional, named


def _option(typed: str, options: dict[str, inspect.Parameter], letters: Mapping[str, str]) -> tuple[str, bool]:
    """The name of the option that `typed` stands for, and whether it was negated, as in --noresume."""
    name = typed.lstrip("-").replace("-", "_")
    name = letters.get(name, name)
    if name in options:
        return name, False
    positive = name.removeprefix("no").lstrip("_")
    if name.startswith("no") and positive in options and _is_switch(options[positive].annotation):
        return positive, True
    if len(name) == 1:
        matching = [option for option in options if option.startswith(name)]
        if len(matching) > 1:
            raise ValueError(f"{typed} could be {' or '.join(f'--{each}' for each in matching)}: give the whole name")
        if matching:
            return matching[0], False
    close = difflib.get_close_matches(name, options, n=1)
    listed = ", ".join(f"--{each}" for each in options) or "none"
    raise ValueError(f"unknown option {typed}: {f'did you mean --{close[0]}?' if close else f'there are {listed}'}")


def _is_switch(annotation: Any) -> bool:
    """Whether an option of this type may stand without a value."""
    return bool in (annotation, *get_args(annotation))


def _value(text: str, annotation: Any) -> Any:
    """The value of an option. A string stays as it was typed, be it run#2, 1.50 or a,b."""
    kinds = {annotation, *get_args(annotation)}
    if bool in kinds and text in SWITCH and (str not in kinds or text in ("True", "False")):
        return SWITCH[text]
    if text == "None" and (type(None) in kinds or str not in kinds):
        return None
    if str in kinds:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
