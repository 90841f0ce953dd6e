"""A CSV of NIfTI volumes and their labels, and what is checked of it before training."""

import argparse
from pathlib import Path

import nibabel
import pandas as pd
from common import check_files, read_csv, split_by_patient, stop
from monai import transforms
from monai.data import CacheDataset

SUFFIXES = (".nii", ".nii.gz")


def check_header(file: str | Path) -> None:
    if len(shape := nibabel.load(file).shape) != 3:
        raise ValueError(f"its shape is {' × '.join(map(str, shape))}, but must have three dimensions")


def read_table(options: argparse.Namespace) -> tuple[pd.DataFrame, list[str]]:
    """Return a row a volume, with its file (image), patient, split and the number of its class (target), and the
    classes."""
    table = read_csv(options.data, dtype={"label": str, "patient": str})
    if lacking := [column for column in ("volume", "label") if column not in table]:
        stop(f"{options.data} lacks the column {lacking[0]}: it has {', '.join(table)}, and needs volume and label")
    if table["label"].isna().any():
        stop(f"{options.data}, line {table['label'].isna().idxmax() + 2}: the label is blank")
    folder = options.images or Path(options.data).parent
    table["image"] = [str(folder / name) for name in table["volume"]]
    for file in table["image"]:
        if not Path(file).is_file():
            stop(f"{file} is missing: give the folder of the volumes as --images")
    check_files(table["image"], check_header, options)
    if "patient" not in table:
        table["patient"] = table["volume"]
    if "split" not in table:
        table["split"] = split_by_patient(table["patient"], options.seed, strata=table["label"])
    classes = sorted(table["label"].unique())
    table["target"] = table["label"].map(classes.index)
    for part in ("train", "valid", "test"):
        if lacking := set(classes) - set(table["label"][table["split"] == part]):
            stop(f"no volume of {lacking.pop()} is in {part}: give a column split, or more patients")
    return table, classes


def make_transform(options: argparse.Namespace, *augmentation: transforms.Transform) -> transforms.Compose:
    """From a file to intensities from 0 to 1 on axes that go to the right, to the front and up."""
    keys = "image"
    read = transforms.LoadImaged(keys, "NibabelReader", ensure_channel_first=True)
    steps = [read, transforms.Orientationd(keys, "RAS", labels=None)]
    if options.spacing:
        steps.append(transforms.Spacingd(keys, options.spacing))
    if options.window:
        steps.append(transforms.ScaleIntensityRanged(keys, *options.window, 0, 1, clip=True))
    else:
        steps.append(transforms.ScaleIntensityRangePercentilesd(keys, 1, 99, 0, 1, clip=True))
    return transforms.Compose([*steps, transforms.SpatialPadd(keys, options.patch), *augmentation])


def make_data(rows: pd.DataFrame, options: argparse.Namespace, augment: bool = False) -> CacheDataset:
    crop = transforms.RandSpatialCropSamplesd("image", options.patch, options.patches, random_size=False)
    flips = [transforms.RandFlipd("image", 0.5, axis) for axis in range(3)]
    transform = make_transform(options, *([crop, *flips] if augment else []))
    samples = rows[[name for name in ("image", "target") if name in rows]].to_dict("records")
    return CacheDataset(samples, transform, cache_rate=options.cache, progress=False)
