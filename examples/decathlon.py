"""Volumes and their labels in the layout of the Medical Segmentation Decathlon, and what is checked before training."""

import argparse
import json
from functools import partial
from pathlib import Path

import nibabel
import numpy as np
import pandas as pd
from common import check_files, first_line, split_by_patient, stop
from monai import transforms
from monai.data import CacheDataset
from torch import Tensor
from volume_tables import cached, check_finite

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
    channels = max(len(described.get("modality", [""])), 1)
    pairs = [f"{sample['image']}\n{sample['label']}" for sample in samples]
    check_files(pairs, lambda files: _check_pair(*files.split("\n"), channels), options)
    one = pd.Series("", pd.RangeIndex(len(samples)))
    parts = split_by_patient(pd.Series([sample["image"] for sample in samples]), options.seed, strata=one)
    split = {
        part: [s for s, its in zip(samples, parts, strict=True) if its == part] for part in ("train", "valid", "test")
    }
    return split, [numbers[i] for i in range(len(numbers))], channels, str(described.get("name", folder.name))


def check_modalities(file: str, channels: int) -> None:
    shape = nibabel.load(file).shape
    if len(shape) not in (3, 4) or (*shape, 1)[3] != channels:
        needed = "three dimensions" if channels == 1 else f"three dimensions, and {channels} modalities in a fourth"
        raise ValueError(f"its shape is {' × '.join(map(str, shape))}, but must have {needed}")


def _check_pair(image_file: str, label_file: str, channels: int) -> None:
    check_modalities(image_file, channels)
    image, label = nibabel.load(image_file), nibabel.load(label_file)
    if image.shape[:3] != label.shape:
        raise ValueError(f"the image's shape is {image.shape} and the label's {label.shape}: voxels must be the same")
    corners = np.stack([np.zeros(3), label.shape])
    places = [nibabel.affines.apply_affine(each.affine, corners) for each in (image, label)]
    if np.abs(places[0] - places[1]).max() > min(nibabel.affines.voxel_sizes(image.affine)):
        raise ValueError("the image and the label lie in other places, by their affines")


def check_label(num_classes: int, label: Tensor) -> Tensor:
    wrong = label[(label != label.round()) | (label < 0) | (label >= num_classes)]
    if len(wrong):
        raise ValueError(f"its label has the value {wrong[0]:g}, but dataset.json has 0 to {num_classes - 1}")
    return label


def make_transform(options: argparse.Namespace, keys: list[str], num_classes: int, augment: bool) -> transforms.Compose:
    """From files to intensities from 0 to 1, and numbers of classes, on axes that go to the right, to the front and
    up."""
    read = transforms.LoadImaged(keys, "NibabelReader", ensure_channel_first=True)
    check = transforms.Lambdad(keys, [check_finite, partial(check_label, num_classes)][: len(keys)])
    steps: list = [read, check, transforms.Orientationd(keys, "RAS", labels=None)]
    if options.spacing:
        steps.append(transforms.Spacingd(keys, options.spacing, mode=["bilinear", "nearest"][: len(keys)]))
    if options.window:
        steps.append(transforms.ScaleIntensityRanged("image", *options.window, 0, 1, clip=True))
    else:
        steps.append(transforms.ScaleIntensityRangePercentilesd("image", 1, 99, 0, 1, clip=True, channel_wise=True))
    if augment:  # half of the patches have a labelled voxel in the middle
        size, num = options.patch, options.patches
        steps.append(transforms.SpatialPadd(keys, size))  # in inference the windows are padded, and cropped again
        steps.append(transforms.RandCropByPosNegLabeld(keys, "label", size, num_samples=num, allow_smaller=False))
        steps.extend(transforms.RandFlipd(keys, 0.5, axis) for axis in range(3))
    return transforms.Compose(steps)


def make_data(
    samples: list[Sample], num_classes: int, options: argparse.Namespace, augment: bool = False
) -> CacheDataset:
    keys = ["image", "label"] if "label" in samples[0] else ["image"]
    return cached(samples, make_transform(options, keys, num_classes, augment), options)
