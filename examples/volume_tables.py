"""A CSV of NIfTI volumes and their labels, and what is checked of it before training."""

import argparse
from pathlib import Path

import nibabel
import pandas as pd
from common import split_by_patient, stop


def read_table(options: argparse.Namespace) -> tuple[pd.DataFrame, list[str]]:
    """Return a row a volume, with its file (image), patient, split and the number of its class (target), and the
    classes."""
    table = pd.read_csv(options.data, dtype={"label": str, "patient": str})
    if lacking := [column for column in ("volume", "label") if column not in table]:
        stop(f"{options.data} lacks the column {lacking[0]}: it has {', '.join(table)}, and needs volume and label")
    if table["label"].isna().any():
        stop(f"{options.data}, line {table['label'].isna().idxmax() + 2}: the label is blank")
    folder = options.images or Path(options.data).parent
    table["image"] = [str(folder / name) for name in table["volume"]]
    for file in table["image"]:
        if not Path(file).is_file():
            stop(f"{file} is missing: give the folder of the volumes as --images")
        if len(shape := nibabel.load(file).shape) != 3:  # which reads the header alone
            stop(f"{file} has the shape {' × '.join(map(str, shape))}, but must have three dimensions")
    if "patient" not in table:
        table["patient"] = table["volume"]
    if "split" not in table:
        table["split"] = split_by_patient(table["patient"], options.seed)
    classes = sorted(table["label"].unique())
    table["target"] = table["label"].map(classes.index)
    for part in ("train", "valid", "test"):
        if lacking := set(classes) - set(table["label"][table["split"] == part]):
            stop(f"no volume of {lacking.pop()} is in {part}: give a column split, or more patients")
    return table, classes
