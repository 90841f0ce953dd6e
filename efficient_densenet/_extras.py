"""Optional dependencies, imported where they are used."""

import importlib
from types import ModuleType


def need(name: str, extra: str) -> ModuleType:
    """Import the module `name`. If it is not installed, raise an error that names the extra to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name != name:
            raise
        raise ModuleNotFoundError(
            f"{name} is not installed, but is needed here: pip install 'efficient_densenet[{extra}]'", name=name
        ) from exc
