"""Print a table of measurements from the CSV files, and check the tables of a document against the files.

    python benchmarks/table.py cpu_torch2.15.0_densenet_bc_100_12_64.csv --allocator system
    python benchmarks/table.py --check README.md

In a document, a comment above each table contains its command. --check lists the commands whose tables differ.
"""

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rows as results
from comparison import OUT_OF_MEMORY
from methods import METHODS, as_list
from options import parse_arguments, run_command

HEADER = ("| model, batch | method | devices | memory | time |", "|---|---|---|---:|---:|")
COMMAND = re.compile(r"<!-- python benchmarks/table\.py (.+?) -->\n+((?:\|.*\n?)*(?:\nMeasured .*\n?)*)")


def table(
    *files: str,
    methods: str | list[str] | None = None,
    precision: str | list[str] | None = None,
    layout: str | list[str] = "contiguous",
    allocator: str | list[str] | None = None,
    check: str = "",
) -> None:
    """Print rows of CSV files in benchmarks/results as a Markdown table: all rows, or those that the options select.

    Args:
        files: their names in benchmarks/results, or paths.
        methods: names of methods, in the order of the rows. Default: all.
        precision: float32, tf32, bf16 or fp16. Default: all.
        layout: contiguous or channels_last.
        allocator: system, tcmalloc or jemalloc. Default: all.
        check: a document whose tables are compared with the output of their commands.
    """
    if check:
        commands = outdated(Path(check).read_text())
        if commands:
            sys.exit("\n".join(f"{check} differs from: python benchmarks/table.py {command}" for command in commands))
        return
    print(render(files, methods, precision, layout, allocator))


def render(
    files: Iterable[str], methods: Any = None, precision: Any = None, layout: Any = "contiguous", allocator: Any = None
) -> str:
    """Return the table of the selected rows."""
    selected = {"method": methods, "precision": precision, "layout": layout, "allocator": allocator}
    selected = {name: as_list(values) for name, values in selected.items() if values}
    rows = [row for file in files for row in _read(file) if all(row[name] in selected[name] for name in selected)]
    if not rows:
        raise ValueError(
            f"no row with {selected} in {', '.join(files) or 'no file'}: give files and values that are in them"
        )
    groups = list(dict.fromkeys(map(_group, rows)))
    order = selected.get("method", list(METHODS))
    rows.sort(key=lambda row: (groups.index(_group(row)), order.index(row["method"])))
    return "\n".join([*HEADER, *map(_line, rows), "", provenance(rows)])


def provenance(rows: Iterable[results.Row]) -> str:
    """A caption with the device, PyTorch, date and commit of the rows."""
    runs = dict.fromkeys(
        f"on {row['device_name']} with PyTorch {row['torch'].partition('+')[0]}, {row['date']}, commit "
        + row["commit"].replace("+", " with uncommitted changes")
        for row in rows
        if row["device_name"]
    )
    return f"Measured {'; '.join(runs)}."


def outdated(text: str) -> list[str]:
    """Return the table commands in a document whose tables differ from their output."""
    commands = []
    for command, printed in COMMAND.findall(text):
        files, options = parse_arguments(table, shlex.split(command))
        options.pop("check")
        if render(files, **options) != printed.strip():
            commands.append(command)
    return commands


def _group(row: results.Row) -> tuple[str, ...]:
    return row["model"], devices(row), row["batch_size"]


def _read(file: str) -> list[results.Row]:
    path = Path(file) if "/" in file else results.RESULTS / file
    rows = results.read(path)
    if not rows:
        raise ValueError(f"no measurements in {path}: make some with python benchmarks/run.py")
    return rows


def _line(row: results.Row) -> str:
    peak = row["tensor_peak_mib"] and f"{round(float(row['tensor_peak_mib'])):,} MiB"
    seconds = row["step_s_median"] and _seconds(float(row["step_s_median"]))
    cells = [
        f"{row['model']}, {row['batch_size']}",
        f"`{row['method']}`",
        devices(row),
        _failure(row["note"]) or _with_ratio(peak, row["tensor_peak_over_plain"]),
        _with_ratio(seconds, row["time_over_plain_median"]),
    ]
    return f"| {' | '.join(cells)} |"


def _failure(note: str) -> str:
    return note if note in ("", OUT_OF_MEMORY) else "failed"


def devices(row: results.Row) -> str:
    """Return a text such as "2 CPU threads, tcmalloc" or "1 NVIDIA H200, bf16"."""
    on_cpu = row["device"] == "cpu"
    threads = "1 CPU thread" if row["threads"] == "1" else f"{row['threads']} CPU threads"
    parts = [threads if on_cpu else f"1 {row['device_name']}"]
    if on_cpu and row["allocator"] != "system":
        parts.append(row["allocator"])
    parts += [
        row[name] for name, default in (("precision", "float32"), ("layout", "contiguous")) if row[name] != default
    ]
    return ", ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms" if value >= 0.1 else f"{value * 1000:.1f} ms"


def _with_ratio(value: str, ratio: str) -> str:
    return f"{value} ({float(ratio):.2f}×)" if ratio else value or "–"


if __name__ == "__main__":
    run_command(table)
