"""Numbers of bytes as people write them: "6GiB"."""

import re

from .._checks import describe, integer

UNITS = {"B": 1} | {f"{prefix}iB": 1 << 10 * i for i, prefix in enumerate("KMGT", 1)}
UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_BY_SPELLING = {unit.lower(): unit for unit in UNITS} | {unit[0].lower(): unit for unit in UNITS if "i" in unit}
"""Units by what people write, in lower case: "g" and "gib" are GiB, as of `docker run --memory 6g`; "gb" is GB."""

_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(name: str, value: int | str) -> int:
    """The number of bytes that an argument called `name` says."""
    if integer(1).accepts(value):
        return int(value)
    found = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    unit = found and _BY_SPELLING.get(found[2].lower())
    size = float(found[1]) * UNITS[unit] if found and unit else 0
    if 1 <= size < float("inf"):
        return round(size)
    example = f"{found[1]}GB" if found and not found[2] else "6GiB"
    raise ValueError(f"{name} is {describe(value)}, but must be a number above 0 with its unit, such as {example!r}")


def format_bytes(size: float) -> str:
    """A size as a text of four digits, such as "1.234 GiB"."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if abs(size) >= UNITS[unit]), "B")
    number = size / UNITS[unit]
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.{max(0, 3 - len(str(int(abs(number)))))}f} {unit}"


def at_least(size: int) -> str:
    """A size as a text such as "734 MiB", rounded up, so that it is enough."""
    unit = "MiB" if size >= UNITS["MiB"] else "KiB"
    return f"{-(-size // UNITS[unit])} {unit}"
