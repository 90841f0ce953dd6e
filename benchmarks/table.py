"""Print a table of measurements from the CSV files, and write the tables of a document anew from the files.

    python benchmarks/table.py cpu_torch2.14.1_densenet_bc_100_12_64.csv --allocator system
    python benchmarks/table.py cpu_torch2.14.1_crossover.csv --columns time,memory --by kernels
    python benchmarks/table.py --write README.md,docs/benchmarks.md,docs/cifar.md

In a document, a comment above each table contains its command. The caption says where the rows were measured, at which
commit, and whether the engine has changed much since; --write refuses rows of code that is in no commit. Threads,
allocator and precision stand there too where all rows have the same: a phone has no room for a column of them.
"""

import functools
import re
import shlex
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rows as results
from comparison import OUT_OF_MEMORY
from methods import METHODS, as_list
from options import parse_arguments, run_command
from plot import read_runs, table_of_runs

import efficient_densenet
from efficient_densenet.memory import what_fits

HEADER = ["model, batch", "method", "devices", "memory", "time"], ["---", "---", "---", "---:", "---:"]
ENGINE = "efficient_densenet/engine", "efficient_densenet/kernels"
LINES = 300
AGE = f" (`engine/` and `kernels/` changed by more than {LINES} lines since)"
UNCOMMITTED = " with uncommitted changes"
COMMAND = re.compile(r"<!-- python benchmarks/table\.py (.+?) -->\n+((?:\|.*\n?)*(?:\nMeasured .*\n?)*)")

PREDICTED = re.compile(r"^<!-- predicted: (.+) -->\n((?:\|.*\n)*)", re.MULTILINE)


def table(
    *files: str,
    methods: str | list[str] | None = None,
    precision: str | list[str] | None = None,
    layout: str | list[str] = "contiguous",
    allocator: str | list[str] | None = None,
    columns: str | list[str] = "",
    by: str = "",
    write: str | list[str] = "",
) -> None:
    """Print rows of CSV files in benchmarks/results as a Markdown table: all rows, or those that the options select.

    Args:
        files: their names in benchmarks/results, or paths. Of a directory of runs, the errors by engine.
        methods: names of methods, in the order of the rows. Default: all.
        precision: float32, tf32, bf16 or fp16. Default: all.
        layout: contiguous or channels_last.
        allocator: system, tcmalloc or jemalloc. Default: all.
        columns: columns of the file that are shown, in the place of memory and time.
        by: a column: of rows with the same value there, the least, the median and the most of `columns`.
        write: documents whose tables are replaced by the output of their commands.
    """
    pages = {document: refreshed(Path(document).read_text()) for document in as_list(write)}
    if refused := [name for name, text in pages.items() if re.search(rf"commit (\w+{UNCOMMITTED}|unknown)", text)]:
        raise ValueError(f"{', '.join(refused)}: rows were measured{UNCOMMITTED}: measure them at a clean tree")
    for document, text in pages.items():
        Path(document).write_text(text)
    if write:
        return
    print(render(files, methods, precision, layout, allocator, columns, by))


def render(
    files: Iterable[str],
    methods: Any = None,
    precision: Any = None,
    layout: Any = "contiguous",
    allocator: Any = None,
    columns: Any = "",
    by: str = "",
) -> str:
    """Return the table of the selected rows. A compiled or a graph's row stands beside that of plain, or not at all."""
    selected = {"method": methods, "precision": precision, "layout": layout, "allocator": allocator}
    selected = {name: as_list(values) for name, values in selected.items() if values}
    paths = [Path(file) if "/" in file else results.RESULTS / file for file in files]
    if any(path.is_dir() for path in paths):
        (path,) = paths
        return f"{table_of_runs(read_runs(path))}\n\n{provenance(results.read_others(path / 'measured.csv', 'commit'))}"
    rows = [row for path in paths for row in _read(path)]
    rows = [row for row in rows if all(row.get(name) in (None, *selected[name]) for name in selected)]
    if not rows:
        raise ValueError(
            f"no row with {selected} in {', '.join(files) or 'no file'}: give files and values that are in them"
        )
    if columns:
        return f"{_of_columns(rows, as_list(columns), by)}\n\n{provenance(rows)}"
    shown = {(*_group(row), row["method"]) for row in rows}
    rows = [row for row in rows if (*_group(row), re.sub("^(compile|graph)_.*", r"\1_plain", row["method"])) in shown]
    groups = list(dict.fromkeys(map(_group, rows)))
    order = selected.get("method", list(METHODS))
    rows.sort(key=lambda row: (groups.index(_group(row)), order.index(row["method"])))
    alike = len(set(map(devices, rows))) == 1
    lines = [f"| {' | '.join(cells[:2] + cells[2 + alike :])} |" for cells in (*HEADER, *map(_cells, rows))]
    return "\n".join([*lines, "", provenance(rows, alike)])


def _of_columns(rows: list[results.Row], columns: list[str], by: str) -> str:
    header, cells = columns, [[row[name] for name in columns] for row in rows]
    if by:
        groups = {row[by]: [each for each in rows if each[by] == row[by]] for row in rows}
        header = [by, "rows", *(f"{name}: {which}" for name in columns for which in ("least", "median", "most"))]
        cells = []
        for value, group in groups.items():
            numbers = [[float(row[name]) for row in group] for name in columns]
            summary = [f"{which(each):.2f}" for each in numbers for which in (min, statistics.median, max)]
            cells.append([value, str(len(group)), *summary])
    names = [name.replace("_", " ") for name in header]
    return "\n".join(f"| {' | '.join(each)} |" for each in (names, ["---"] * len(names), *cells))


def provenance(rows: Iterable[results.Row], alike: bool = False) -> str:
    """A caption with the device, PyTorch, date and commit of the rows, and their age; where all ran on devices that are
    set up alike, with that too."""

    def place(row: results.Row) -> str:
        name = row["device_name"]
        return name if not alike else f"{devices(row) if name in devices(row) else f'{name}, {devices(row)}'},"

    runs = dict.fromkeys(
        f"on {place(row)} with PyTorch {row['torch'].partition('+')[0]}, {row['date']}, commit "
        + row["commit"].replace("+", UNCOMMITTED)
        + (AGE if (lines_changed_since(row["commit"].rstrip("+")) or 0) > LINES else "")
        for row in rows
        if row["device_name"]
    )
    return f"Measured {'; '.join(runs)}."


@functools.cache
def lines_changed_since(commit: str) -> int | None:
    """How many lines of the engine and its kernels were added or removed since a commit; None where git has none."""
    try:
        changes = results.git("diff", "--numstat", commit, "--", *ENGINE)
    except (OSError, subprocess.CalledProcessError):
        return None
    return sum(int(number) for number in re.findall(r"\b\d+(?=\t)", changes))


def outdated(text: str) -> list[str]:
    """Return the table commands in a document whose tables differ from their output, but for the age."""
    return [
        command
        for command, printed in COMMAND.findall(text)
        if _output(command).replace(AGE, "") != printed.strip().replace(AGE, "")
    ]


def refreshed(text: str) -> str:
    """A document with the tables that its commands print, also below a command without one."""
    text = PREDICTED.sub(lambda match: f"<!-- predicted: {match[1]} -->\n{predicted(match[1])}", text)
    return COMMAND.sub(
        lambda match: (
            f"<!-- python benchmarks/table.py {match[1]} -->\n{_output(match[1])}\n" + ("" if match[2] else "\n")
        ),
        text,
    )


def predicted(expressions: str) -> str:
    """The table under a comment that names models, each with an optimizer and shapes of batches, separated by ";"."""
    rows = [["model, batch", "a step: plain", "shared", "largest batch in 8 GB: plain", "shared"]]
    rows += [["---", *["---:"] * 4]]
    for each in expressions.split(";"):
        model, optimizer, *shapes = eval(f"lambda: ({each})", dict(vars(efficient_densenet)))()
        for batch_size, *shape in shapes:
            settings = {"precisions": ["float32"], "batch_size": batch_size, "optimizer": optimizer}
            fits = list(what_fits(model, shape[1:], "8GB", **settings))
            batch = f"{each.strip().partition('(')[0]}, {'×'.join(map(str, (batch_size, *shape)))}"
            steps = [f"{fit.sizes[batch_size] / 2**30:.2f} GiB" for fit in fits]
            rows.append([batch, *steps, *[f"{fit.largest_batch:,}" for fit in fits]])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _output(command: str) -> str:
    files, options = parse_arguments(table, shlex.split(command))
    return render(files, **{name: value for name, value in options.items() if name != "write"})


def _group(row: results.Row) -> tuple[str, ...]:
    return row["model"], devices(row), row["batch_size"], row["image_size"]


def _read(path: Path) -> list[results.Row]:
    rows = results.read(path) or results.read_others(path, "commit")
    if not rows:
        raise ValueError(f"no measurements in {path}: make some with python benchmarks/run.py")
    return rows


def _cells(row: results.Row) -> list[str]:
    peak = row["tensor_peak_mib"] and f"{round(float(row['tensor_peak_mib'])):,} MiB"
    seconds = row["step_s_median"] and _seconds(float(row["step_s_median"]))
    failure = row["note"] if row["note"] in ("", OUT_OF_MEMORY) else "failed"
    shape = "×" + row["image_size"].replace("x", "×") if "x" in row["image_size"] else ""
    return [
        f"{row['model']}, {row['batch_size']}{shape}",
        f"`{row['method']}`",
        devices(row),
        failure or _with_ratio(peak, row["tensor_peak_over_plain"]),
        _with_ratio(seconds, row["time_over_plain_median"]),
    ]


def devices(row: results.Row) -> str:
    """Return a text such as "2 CPU threads, tcmalloc" or "1 NVIDIA H200, bf16"."""
    on_cpu = row["device"] == "cpu"
    threads = "1 CPU thread" if row["threads"] == "1" else f"{row['threads']} CPU threads"
    count = row["devices"] or "1"
    parts = [threads if on_cpu else f"{count} {row['device_name']}"]
    if on_cpu and count != "1":
        parts.insert(0, f"{count} replicas")
    if on_cpu and row["allocator"] != "system":
        parts.append(row["allocator"])
    parts += [
        row[name] for name, default in (("precision", "float32"), ("layout", "contiguous")) if row[name] != default
    ]
    return ", ".join([*parts, *([f"at most {row['card_gb']} GB"] if row["card_gb"] else [])])


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms" if value >= 0.1 else f"{value * 1000:.1f} ms"


def _with_ratio(value: str, ratio: str) -> str:
    return f"{value} ({float(ratio):.2f}×)" if ratio else value or "–"


if __name__ == "__main__":
    run_command(table)
