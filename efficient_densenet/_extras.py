"""Packages that only parts of this one need, imported when those parts run."""

import importlib
from types import ModuleType


def need(name: str, extra: str) -> ModuleType:
    """Import `name`, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name != name:
            raise
        raise ModuleNotFoundError(
            f"{name} is not installed, but is needed here: pip install 'efficient_densenet[{extra}]'", name=name
        ) from exc
