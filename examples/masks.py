"""Images and masks in CamVid's layout: its folders, its classes.csv, and what is checked before training."""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import first_line, read_csv, stop
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from tqdm import tqdm

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
IGNORE = 255
"""The number of pixels that have no class."""
_UNKNOWN = 254


CAMVID = Path(__file__).with_name("camvid_classes.csv")
"""CamVid's 32 classes as the usual 11."""


class Classes:
    """The classes of a classes.csv, with the columns name and, for masks in colors, r, g and b; rows of one name are
    one class.

    A mask has these colors or, if it has one channel, the numbers of the rows, from 0.
    """

    def __init__(self, folder: Path, ignored: list[str], path: Path | None = None) -> None:
        places = [path] if path else [folder / "classes.csv", folder / "class_dict.csv"]
        if not folder.is_dir():
            stop(f"{folder} is {'no folder' if folder.exists() else 'missing'}: give --data in CamVid's layout")
        self.path = next((place for place in places if place.is_file()), None)
        if self.path is None:
            stop(f"{path or folder / 'classes.csv'} is missing, with the column name (and r, g, b where masks are in "
                 f"colors) and a line a class: give one as --classes, such as {CAMVID} for CamVid")  # fmt: skip
        table, colors = read_csv(self.path), ["r", "g", "b"]
        if "name" not in table:
            stop(
                f"{self.path} lacks the column name: it has {', '.join(table)}, and needs name, and r, g, b for colors"
            )
        if lacking := [column for column in colors if column not in table and set(colors) & set(table)]:
            stop(f"{self.path} lacks the column {lacking[0]}: it has {', '.join(table)}, and needs name, r, g, b")
        if lacking := [name for name in ignored if name not in set(table["name"])]:
            stop(f"{self.path} has no class {lacking[0]}, but {', '.join(table['name'].unique())}: change --ignore")
        self.names = [name for name in table["name"].unique() if name not in ignored]
        if len(self.names) < 2:
            stop(f"{self.path} has {self.names or 'no class'} beside --ignore, but two classes or more are needed")
        numbers = [IGNORE if name in ignored else self.names.index(name) for name in table["name"]]
        self._by_color, self._by_number = np.full(1 << 24, _UNKNOWN, np.uint8), np.full(256, _UNKNOWN, np.uint8)
        self._by_number[: len(numbers)], self._by_number[IGNORE] = numbers, IGNORE
        if set(colors) <= set(table):
            values = table[colors].apply(pd.to_numeric, errors="coerce")
            if (wrong := ~values.isin(range(256)).all(axis=1)).any():
                stop(f"{self.path}, line {wrong.idxmax() + 2}: r, g and b must be whole numbers from 0 to 255")
            self._by_color[values.to_numpy(int) @ [1 << 16, 1 << 8, 1]] = numbers

    def read(self, path: Path) -> np.ndarray:
        """A mask as the number of each pixel's class, or IGNORE."""
        try:
            with Image.open(path) as image:
                is_number = image.mode in ("L", "P") or image.mode.startswith("I")
                pixels = np.asarray(image if is_number else image.convert("RGB"))
        except (OSError, ValueError, SyntaxError) as error:
            stop(f"{path} cannot be read ({first_line(error)}): replace it, or take it and its image out")
        if is_number:
            mask = np.where((pixels >= 0) & (pixels < 256), self._by_number[pixels.clip(0, 255)], _UNKNOWN)
        else:
            mask = self._by_color[pixels.astype(int) @ [1 << 16, 1 << 8, 1]]
        if (unknown := mask == _UNKNOWN).any():
            color = pixels[unknown][0].tolist()
            stop(f"{path} has pixels of {color}, which no line of {self.path} is: add one, or mend the mask")
        return mask


def check_picture(path: Path, options: argparse.Namespace) -> tuple[int, int]:
    """Width and height of a picture of 8 bits a channel."""
    with Image.open(path) as image:
        if image.mode == "F" or image.mode.startswith("I") or ";16" in str(getattr(image, "tile", "")):
            raise ValueError("more than 8 bits a channel: convert it to 8")
        if min(options.image_size or image.size) < 32:
            size = " × ".join(map(str, image.size))
            raise ValueError(f"{size} pixels, but the network needs 32 × 32 at least: give --image_size")
        return image.size


def find_pairs(folder: Path, part: str, options: argparse.Namespace) -> list[tuple[Path, Path]]:
    """The images of a folder such as train, with the masks of train_labels (or trainannot), of the same sizes."""
    masks = next((folder / f"{part}{end}" for end in ("_labels", "annot") if (folder / f"{part}{end}").is_dir()), None)
    if masks is None or not (folder / part).is_dir():
        stop(f"{folder} must have the folders {part} and {part}_labels, for images and masks")
    pairs = []
    shown = (path for path in (folder / part).iterdir() if path.name[0] != ".")
    images = sorted(path for path in shown if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
    for image in tqdm(images, f"pictures, {part}", leave=False):
        mask = next(
            (masks / f"{image.stem}{end}" for end in ("_L.png", ".png") if (masks / f"{image.stem}{end}").is_file()),
            None,
        )
        if mask is None:
            stop(f"{image} has no mask {image.stem}.png or {image.stem}_L.png in {masks}: add it, or drop the image")
        pairs.append((image, mask))
        if options.no_check:
            continue
        try:
            with Image.open(mask) as opened:
                sizes = [f"{width} × {height}" for width, height in (check_picture(image, options), opened.size)]
        except (OSError, ValueError, SyntaxError) as error:
            stop(f"{image} or its mask {mask} cannot be read ({first_line(error)}): replace it, or take both out")
        if sizes[0] != sizes[1]:
            stop(f"{image} has {sizes[0]} pixels, but its mask {mask.name} {sizes[1]}: they must be alike")
    if not pairs:
        stop(f"{folder / part} has no .png or .jpg images: put some there")
    return pairs


def count_pixels(pairs: list[tuple[Path, Path]], classes: Classes, title: str) -> np.ndarray:
    """A row an image: how many pixels each class has. It reads every mask, and stops at one with another color."""
    num = len(classes.names)
    masks = (classes.read(mask) for _, mask in tqdm(pairs, title, leave=False))
    return np.stack([np.bincount(mask.ravel(), minlength=256)[:num] for mask in masks])


def median_frequency_weights(pixels: np.ndarray) -> np.ndarray:
    """Of each class: its frequency in the images that have it; and the median of the frequencies, divided by it."""
    in_its_images = np.where(pixels > 0, pixels.sum(1, keepdims=True), 0).sum(0)
    frequency = pixels.sum(0) / in_its_images.clip(1)
    return np.median(frequency[frequency > 0]) / np.where(frequency > 0, frequency, np.inf)


def make_transform(options: argparse.Namespace, *augmentation: nn.Module) -> v2.Compose:
    resize = [v2.Resize(options.image_size)] if options.image_size else []
    to_numbers = v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.long}, scale=True)
    return v2.Compose([*resize, *augmentation, to_numbers, v2.Normalize(MEAN, STD)])


class Scenes(Dataset):
    """Pictures, with the number of each pixel's class; without classes the pictures alone."""

    def __init__(
        self, pairs: list, classes: Classes | None, options: argparse.Namespace, *augmentation: nn.Module
    ) -> None:
        self.pairs, self.classes, self.files = pairs, classes, [str(image) for image, _ in pairs]
        self.transform = make_transform(options, *augmentation)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> Tensor | tuple[Tensor, Tensor]:
        image, mask = self.pairs[i]
        pixels = v2.functional.to_image(Image.open(image).convert("RGB"))
        if self.classes is None:
            return self.transform(pixels)
        return self.transform(pixels, tv_tensors.Mask(self.classes.read(mask)))
