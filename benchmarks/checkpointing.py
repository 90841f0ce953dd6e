"""Does a call checkpointed by this package or by torch.utils.checkpoint behave as the plain call? Yes or no.

    python benchmarks/checkpointing.py

Writes a CSV file to benchmarks/results, and prints a Markdown table.
"""

import rows as results
import torch
from checkpointing_probes import PROBES, WRAPPERS, answer
from options import run_command


def probe_behaviours() -> None:
    """Run all probes on all implementations; print the table and write the file, with one row for each probe."""
    rows = []
    for probe in PROBES:
        answers = {name: answer(probe, name) for name in WRAPPERS}
        rows.append({"behaviour": probe.__name__.replace("_", " "), **answers})
    print("| | " + " | ".join(WRAPPERS) + " |\n|---|" + ":---:|" * len(WRAPPERS))
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    results.write(results.RESULTS / f"checkpointing_behaviours_torch{torch.__version__.split('+')[0]}.csv", rows)


if __name__ == "__main__":
    run_command(probe_behaviours)
