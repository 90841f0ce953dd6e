"""The README's table, from the CSV files: what it shows is what was measured.

    python benchmarks/table.py cpu_torch2.15.0_densenet_bc_100_12_64.csv --allocator system
    python benchmarks/table.py --check README.md

In a README the command stands in a comment above its table, and --check tells whether they still agree.
"""

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rows as results
from methods import METHODS
from options import read, start
from settings import many
from turns import OUT_OF_MEMORY

HEADER = ("| method | devices | batch | memory | time |", "|---|---|---:|---:|---:|")
COMMAND = re.compile(r"<!-- python benchmarks/table\.py (.+?) -->\n+((?:\|.*\n?)*)")


def table(
    *files: str,
    methods: str | list[str] | None = None,
    precision: str | list[str] | None = None,
    layout: str | list[str] = "contiguous",
    allocator: str | list[str] | None = None,
    check: str = "",
) -> None:
    """Print the rows of CSV files in benchmarks/results as the README's table: all, or those with the given properties.

    Args:
        files: their names in benchmarks/results, or paths.
        methods: which of them.
        precision: float32, tf32, bf16, fp16.
        layout: contiguous or channels_last.
        allocator: system, tcmalloc or jemalloc.
        check: a README, to be compared with what its table's command gives now.
    """
    if check:
        different = outdated(Path(check).read_text())
        if different:
            sys.exit("\n".join(f"{check} differs from: python benchmarks/table.py {command}" for command in different))
        return
    print(render(files, methods, precision, layout, allocator))


def render(
    files: Iterable[str], methods: Any = None, precision: Any = None, layout: Any = "contiguous", allocator: Any = None
) -> str:
    wanted = {"method": methods, "precision": precision, "layout": layout, "allocator": allocator}
    wanted = {name: many(values) for name, values in wanted.items() if values}
    rows = [row for file in files for row in _read(file) if all(row[name] in wanted[name] for name in wanted)]
    if not rows:
        raise ValueError(
            f"no row with {wanted} in {', '.join(files) or 'no file'}: name files and properties they have"
        )
    groups = list(dict.fromkeys(map(_group, rows)))
    rows.sort(key=lambda row: (groups.index(_group(row)), list(METHODS).index(row["method"])))
    with_model = len({row["model"] for row in rows}) > 1
    return "\n".join([*HEADER, *(_line(row, with_model) for row in rows)])


def outdated(text: str) -> list[str]:
    """The table commands in a README's text whose tables are not what they give."""
    different = []
    for words, shown in COMMAND.findall(text):
        files, options = read(table, shlex.split(words))
        options.pop("check")
        if render(files, **options) != shown.strip():
            different.append(words)
    return different


def _group(row: results.Row) -> tuple[str, ...]:
    return row["model"], devices(row), row["batch_size"]


def _read(file: str) -> list[results.Row]:
    path = Path(file) if "/" in file else results.RESULTS / file
    rows = results.read(path)
    if not rows:
        raise ValueError(f"no measurements in {path}: make some with python benchmarks/run.py")
    return rows


def _line(row: results.Row, with_model: bool) -> str:
    name = f"`{row['method']}`: {METHODS[row['method']].label}" + (f" ({row['model']})" if with_model else "")
    peak = row["tensor_peak_mib"] and f"{round(float(row['tensor_peak_mib'])):,} MiB"
    taken = row["step_s_median"] and _seconds(float(row["step_s_median"]))
    cells = [
        name,
        devices(row),
        row["batch_size"],
        _failure(row["note"]) or _with_ratio(peak, row["tensor_peak_over_plain"]),
        _with_ratio(taken, row["time_over_plain_median"]),
    ]
    return f"| {' | '.join(cells)} |"


def _failure(note: str) -> str:
    return note if note in ("", OUT_OF_MEMORY) else "failed"


def devices(row: results.Row) -> str:
    """Such as "2 CPU threads, tcmalloc" or "1 NVIDIA H200, bf16"."""
    on_cpu = row["device"] == "cpu"
    threads = "1 CPU thread" if row["threads"] == "1" else f"{row['threads']} CPU threads"
    parts = [threads if on_cpu else f"1 {row['device_name']}"]
    if on_cpu and row["allocator"] != "system":
        parts.append(row["allocator"])
    parts += [row[name] for name, usual in (("precision", "float32"), ("layout", "contiguous")) if row[name] != usual]
    return ", ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms" if value >= 0.1 else f"{value * 1000:.1f} ms"


def _with_ratio(value: str, ratio: str) -> str:
    return f"{value} ({float(ratio):.2f}×)" if ratio else value or "–"


if __name__ == "__main__":
    start(table)
