"""Compare this package's checkpointing with torch.utils.checkpoint's and fairscale's.

    python benchmarks/checkpointing.py behaviours     does a checkpointed call behave as the plain call? yes or no
    python benchmarks/checkpointing.py costs          time on tiny layers and memory on large ones, beside torch's

Both write a CSV file to benchmarks/results. `behaviours` also prints a Markdown table.
"""

from typing import Any

import rows as results
import torch
from checkpointing_costs import measure_costs
from checkpointing_probes import PROBES, WRAPPERS, answer
from training.command_line import command


def probe_behaviours() -> list[dict[str, str]]:
    """Run all probes on all implementations, print the table, and return one row for each probe."""
    rows = []
    for probe in PROBES:
        answers = {name: answer(probe, name) for name in WRAPPERS}
        rows.append({"behaviour": probe.__name__.replace("_", " "), **answers})
    print("| | " + " | ".join(WRAPPERS) + " |\n|---|" + ":---:|" * len(WRAPPERS))
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    return rows


def measure(*files: str, rounds: int = 60) -> None:
    """Run the benchmarks and write their CSV files.

    Args:
        files: behaviours, costs or both.
        rounds: number of timed steps in costs.
    """
    if not files or {*files} - {"behaviours", "costs"}:
        raise ValueError(f"found {' '.join(files) or 'no benchmark'}: give behaviours or costs")
    if "behaviours" in files:
        _write("behaviours", probe_behaviours())
    if "costs" in files:
        _write("costs", measure_costs(rounds))


def _write(name: str, rows: list[dict[str, Any]]) -> None:
    path = results.RESULTS / f"checkpointing_{name}_torch{torch.__version__.split('+')[0]}.csv"
    results.write(path, rows)


if __name__ == "__main__":
    command(measure)
