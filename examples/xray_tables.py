"""The CSVs of NIH ChestX-ray14 and CheXpert as one table: pictures, patients, labels, and the split by patient."""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from common import check_files, counted, first_line, read_csv, split_by_patient, stop
from xray_images import SUFFIXES, check_header

NIH = {"Image Index", "Finding Labels", "Patient ID"}
MEANINGS = {"zeros": "taken as negative", "ones": "taken as positive", "ignore": "left out as not known"}
NOT_LABELS = ["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", "patient"]
"""Columns of CheXpert that are no labels, and "patient", which a table of one's own in its layout may have."""


def read_table(options: argparse.Namespace) -> tuple[pd.DataFrame, list[str], str]:
    """Return a row a picture, the labels, and the data set's name.

    The columns are image (its name), file, patient, split, and the labels: 1, 0, or NaN where it is not known.
    """
    table = read_csv(options.data)
    if options.views == "frontal" and "Frontal/Lateral" in table:
        table = table[table["Frontal/Lateral"] == "Frontal"]
    if table.empty:
        kind = "frontal picture" if options.views == "frontal" else "picture"
        stop(f"{options.data} has no line of a {kind}: it needs one for each")
    if set(table) >= NIH:
        name = "generated X-rays" if Path(options.data).parent.name == "generated" else "NIH ChestX-ray14"
        labels = table["Finding Labels"].str.get_dummies("|").drop(columns="No Finding", errors="ignore")
        images, patients = table["Image Index"], table["Patient ID"]
    elif "Path" in table:
        name = "CheXpert"
        labels = table.drop(columns=NOT_LABELS, errors="ignore")
        images = table["Path"]
        patients = table["patient"] if "patient" in table else images.str.extract(r"(patient\d+)", expand=False)
    else:
        stop(f"{options.data} has the columns {', '.join(table)}, but needs {', '.join(sorted(NIH))} (NIH) or Path and "
             "a column a label (CheXpert)")  # fmt: skip
    if not len(labels.columns):
        stop(f"{options.data} has no label: it needs one, beside No Finding, that some pictures have")
    if (again := images.duplicated()).any():
        row = again.idxmax()
        stop(f"{options.data}, line {row + 2}: {images[row]} has a line above as well: take one of them out")
    chosen = options.labels or list(labels)
    if missing := [label for label in chosen if label not in labels]:
        stop(f"{options.data} lacks the label {missing[0]}: it has {', '.join(labels)}")
    numbers = labels[chosen].apply(pd.to_numeric, errors="coerce").astype(float)
    for label in chosen:
        if (wrong := labels[label].notna() & ~numbers[label].isin([-1, 0, 1])).any():
            row = wrong.idxmax()
            stop(f"{options.data}, line {row + 2}: {label} is {labels[label][row]}, but must be 1, 0, -1 or blank")
    if patients.isna().any():
        remedy = "fill in its patient" if set(table) & {"patient", "Patient ID"} else "add a column patient"
        stop(f"{options.data}, line {patients.isna().idxmax() + 2}: no patient is named, by whom the data is split: "
             f"{remedy}")  # fmt: skip
    counts_as = {"ignore": np.nan, "ones": 1.0, "zeros": 0.0}
    blank, uncertain = numbers.isna(), numbers == -1
    numbers = numbers.mask(blank, counts_as[options.blank]).mask(uncertain, counts_as[options.uncertain])
    if name == "CheXpert":
        for kind, which, policy in (("blank", blank, options.blank), ("uncertain", uncertain, options.uncertain)):
            print(f"{which.to_numpy().sum():,} {kind} labels are {MEANINGS[policy]} (--{kind} {policy})")
    numbers.insert(0, "image", images)
    numbers.insert(1, "file", _find_images(list(images), Path(options.images or Path(options.data).parent)))
    numbers.insert(2, "patient", patients)
    numbers.insert(3, "split", _split(numbers, options))
    if empty := {"train", "valid", "test"} - set(numbers["split"]):
        num = counted(patients.nunique(), "patient")
        stop(f"{options.data} has {num}, too few to split: none is left for {empty.pop()}")
    for part, use in (("train", "learned"), ("valid", "validated"), ("test", "scored")):
        values = numbers.loc[numbers["split"] == part, chosen].nunique()
        alike = list(values[values < 2].index)
        if len(alike) == len(chosen) and part != "test":
            stop(f"{options.data} has no label of 0 and 1 among the pictures for {part}, so that none can be {use}: "
                 "give more pictures, or another --seed")  # fmt: skip
        if alike:
            print(f"note: {', '.join(alike)} cannot be {use}: no two pictures for {part} differ in it")
    check_files(numbers["file"], check_header, options)
    return numbers, chosen, name


def _find_images(names: list[str], folder: Path) -> list[str]:
    files = folder.rglob("*")  # NIH's are spread over twelve folders
    by_name = {path.name: path for path in files if path.suffix.lower() in SUFFIXES}
    found = list[str]()
    missing = list[str]()
    for name in names:
        places = folder / name, folder.parent / name, by_name.get(name, folder / name)
        path = next((path for path in places if path.is_file()), None)
        (found if path else missing).append(str(path or name))
    if missing:
        stop(f"{len(missing)} of {len(names)} pictures are not in {folder}, such as {missing[0]}: give their --images")
    return found


def _split(table: pd.DataFrame, options: argparse.Namespace) -> np.ndarray:
    if options.test_list is None:
        return split_by_patient(table["patient"], options.seed)
    try:
        names = Path(options.test_list).read_text().split()
    except (OSError, ValueError) as error:
        stop(f"--test_list {options.test_list} cannot be read ({first_line(error)}): give a file of names")
    images = table["image"].map(lambda path: Path(path).name)
    is_test = images.isin(names)
    if not is_test.any():
        stop(f"--test_list {options.test_list} names no picture of {options.data}: give names such as {images.iloc[0]}")
    if unknown := sorted(set(names) - set(images)):
        print(f"note: {len(unknown):,} of the {len(names):,} names in {options.test_list} are not in {options.data}, "
              f"such as {unknown[0]}")  # fmt: skip
    if both := set(table["patient"][is_test]) & set(table["patient"][~is_test]):
        stop(f"{options.test_list} has some pictures of patient {both.pop()} but not all: a patient is on one side")
    return np.where(is_test, "test", split_by_patient(table["patient"], options.seed, valid=0.125, test=0))
