"""Volumes and their labels in the layout of the Medical Segmentation Decathlon, and what is checked before training."""

import argparse
import json
from pathlib import Path

import nibabel
import pandas as pd
from common import check_files, first_line, split_by_patient, stop
from monai import transforms
from monai.data import CacheDataset

Sample = dict[str, str]


def read_folder(folder: Path, options: argparse.Namespace) -> tuple[dict[str, list[Sample]], list[str], int, str]:
    """The samples of train, valid and test; the classes, the channels and the name that dataset.json says.

    The Decathlon's own test volumes have no labels: all parts are of those for training.
    """
    path = folder / "dataset.json"
    try:
        described = json.loads(path.read_text())
        labels, listed = described["labels"], described["training"]
        numbers = {int(number): str(name) for number, name in labels.items()}
        samples = [{key: str(folder / sample[key]) for key in ("image", "label")} for sample in listed]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        stop(f"{path} cannot be read ({first_line(error)}): it must have labels, such as {{\"0\": \"background\", "
             "\"1\": \"spleen\"}, and training, a list of image and label")  # fmt: skip
    if sorted(numbers) != list(range(len(numbers))) or len(numbers) < 2:
        stop(f"{path} has the labels {sorted(numbers)}, but must have 0 for the background, 1 and so on")
    for sample in samples:
        for key, file in sample.items():
            if not Path(file).is_file():
                stop(f"{file} is missing, the {key} of a training volume of {path}")
    if len(samples) < 3:
        stop(f"{path} has {len(samples)} training volumes, but needs one to train, to validate and to test at least")
    check_files([f"{sample['image']}\n{sample['label']}" for sample in samples], _check_pair, options)
    one = pd.Series("", pd.RangeIndex(len(samples)))
    parts = split_by_patient(pd.Series([sample["image"] for sample in samples]), options.seed, strata=one)
    split = {
        part: [s for s, its in zip(samples, parts, strict=True) if its == part] for part in ("train", "valid", "test")
    }
    channels = max(len(described.get("modality", [""])), 1)
    return split, [numbers[i] for i in range(len(numbers))], channels, str(described.get("name", folder.name))


def _check_pair(files: str) -> None:
    image, label = (nibabel.load(file).shape for file in files.split("\n"))
    if image[:3] != label[:3] or len(label) != 3 or len(image) > 4:
        raise ValueError(f"the image's shape is {image} and the label's {label}, but both must have the same voxels")


def make_transform(options: argparse.Namespace, keys: list[str], augment: bool) -> transforms.Compose:
    """From files to intensities from 0 to 1, and numbers of classes, on axes that go to the right, to the front and
    up."""
    read = transforms.LoadImaged(keys, "NibabelReader", ensure_channel_first=True)
    steps: list = [read, transforms.Orientationd(keys, "RAS", labels=None)]
    if options.spacing:
        steps.append(transforms.Spacingd(keys, options.spacing, mode=["bilinear", "nearest"][: len(keys)]))
    if options.window:
        steps.append(transforms.ScaleIntensityRanged("image", *options.window, 0, 1, clip=True))
    else:
        steps.append(transforms.ScaleIntensityRangePercentilesd("image", 1, 99, 0, 1, clip=True, channel_wise=True))
    steps.append(transforms.SpatialPadd(keys, options.patch))
    if augment:  # half of the patches have a labelled voxel in the middle
        size, num = options.patch, options.patches
        steps.append(transforms.RandCropByPosNegLabeld(keys, "label", size, num_samples=num, allow_smaller=False))
        steps.extend(transforms.RandFlipd(keys, 0.5, axis) for axis in range(3))
    return transforms.Compose(steps)


def make_data(samples: list[Sample], options: argparse.Namespace, augment: bool = False) -> CacheDataset:
    keys = ["image", "label"] if "label" in samples[0] else ["image"]
    transform = make_transform(options, keys, augment)
    return CacheDataset(samples, transform, cache_rate=options.cache, progress=False)
