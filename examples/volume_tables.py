"""A CSV of NIfTI volumes and their labels, what is checked of it before training, and options for volumes."""

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

import common
import nibabel
import pandas as pd
from common import at_least, check_files, positive, read_csv, share, split_by_patient, stop
from monai import transforms
from monai.data import CacheDataset
from torch import Tensor

# MONAI makes readers for other formats beside the one that is asked for, and says what those would like to have.
warnings.filterwarnings("ignore", "NvImgCodec")
logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)

SUFFIXES = (".nii", ".nii.gz")


def parse_options(
    parser: argparse.ArgumentParser, words: list[str] | None, patch: int, **of_generated: Any
) -> argparse.Namespace:
    """The options, with those of reading volumes and of patches, whose sides are `patch` by default."""
    add = parser.add_argument
    add("--patch", type=at_least(32), nargs=3, metavar="VOXELS", default=[patch] * 3, help="size of a patch")
    add("--patches", type=at_least(1), default=2, help="patches from a volume: a step has batch_size times as many")
    add("--spacing", type=positive, nargs=3, metavar="MM", help="resample to voxels of this size first")
    window = "intensities that become 0 and 1, such as Hounsfield units; by default the 1st and 99th percentile"
    add("--window", type=float, nargs=2, metavar=("LOW", "HIGH"), help=window)
    add("--cache", type=float, default=0.0, help="share of the volumes that are kept in memory")
    add("--overlap", type=share, default=0.5, help="share by which windows overlap in inference")
    return common.parse_options(parser, words, patch=[32] * 3, **of_generated)


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
    for part in set(table["split"]) - {"train", "valid", "test"}:
        line = (table["split"] == part).idxmax() + 2
        stop(f"{options.data}, line {line}: split is {part}, but must be train, valid or test")
    classes = sorted(table["label"].unique())
    if len(classes) < 2:
        stop(f"{options.data} has the label {classes[0]} alone: give volumes of two classes at least")
    table["target"] = table["label"].map(classes.index)
    for part in ("train", "valid", "test"):
        if lacking := set(classes) - set(table["label"][table["split"] == part]):
            stop(f"no volume of {lacking.pop()} is in {part}: give a column split, or more patients")
    return table, classes


def check_finite(volume: Tensor) -> Tensor:
    if not volume.isfinite().all():
        raise ValueError("it has voxels that are NaN or infinite")
    return volume


def make_transform(options: argparse.Namespace, *augmentation: transforms.Transform) -> transforms.Compose:
    """From a file to intensities from 0 to 1 on axes that go to the right, to the front and up."""
    keys = "image"
    read = transforms.LoadImaged(keys, "NibabelReader", ensure_channel_first=True)
    steps = [read, transforms.Lambdad(keys, check_finite), transforms.Orientationd(keys, "RAS", labels=None)]
    if options.spacing:
        steps.append(transforms.Spacingd(keys, options.spacing))
    if options.window:
        steps.append(transforms.ScaleIntensityRanged(keys, *options.window, 0, 1, clip=True))
    else:
        steps.append(transforms.ScaleIntensityRangePercentilesd(keys, 1, 99, 0, 1, clip=True))
    return transforms.Compose([*steps, *augmentation])


def make_data(rows: pd.DataFrame, options: argparse.Namespace, augment: bool = False) -> CacheDataset:
    pad = transforms.SpatialPadd("image", options.patch)  # in inference the windows are padded, and cropped again
    crop = transforms.RandSpatialCropSamplesd("image", options.patch, options.patches, random_size=False)
    flips = [transforms.RandFlipd("image", 0.5, axis) for axis in range(3)]
    transform = make_transform(options, *([pad, crop, *flips] if augment else []))
    samples = rows[[name for name in ("image", "target") if name in rows]].to_dict("records")
    return cached(samples, transform, options)


def cached(samples: list, transform: transforms.Compose, options: argparse.Namespace) -> CacheDataset:
    """The samples, a share of them kept in memory once they are read, and none read before it is asked for."""
    when = "processes" if options.workers else True
    return CacheDataset(samples, transform, cache_rate=options.cache, progress=False, runtime_cache=when)
