"""Optional dependencies, imported where they are used."""

import importlib
from types import ModuleType


def need(name: str, extra: str) -> ModuleType:
    """Import the module `name`. If it is not installed, raise an error that names the extra to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        package = name.partition(".")[0]
        if exc.name not in (name, package):
            raise
        raise ModuleNotFoundError(
            f"{package} is not installed, but is needed here: pip install -e '.[{extra}]' in a clone", name=name
        ) from exc
