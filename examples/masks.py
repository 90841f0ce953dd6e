"""Images and masks in CamVid's layout: its folders, its classes.csv, and what is checked before training."""

from pathlib import Path

import numpy as np
import pandas as pd
from common import stop
from PIL import Image
from tqdm import tqdm

IGNORE = 255
"""The number of pixels that have no class."""
_UNKNOWN = 254


class Classes:
    """The classes of a classes.csv, with the columns name, r, g and b; rows of one name are one class.

    A mask has these colors or, if it has one channel, the numbers of the rows, from 0.
    """

    def __init__(self, folder: Path, ignored: list[str]) -> None:
        path = next((folder / name for name in ("classes.csv", "class_dict.csv") if (folder / name).is_file()), None)
        if path is None:
            stop(f"{folder} has no classes.csv, with the columns name, r, g, b and a line a class")
        table = pd.read_csv(path)
        if lacking := [column for column in ("name", "r", "g", "b") if column not in table]:
            stop(f"{path} lacks the column {lacking[0]}: it has {', '.join(table)}, and needs name, r, g, b")
        if lacking := [name for name in ignored if name not in set(table["name"])]:
            stop(f"{path} has no class {lacking[0]}, but {', '.join(table['name'])}: change --ignore")
        colors = table[["r", "g", "b"]].apply(pd.to_numeric, errors="coerce")
        if (wrong := ~colors.isin(range(256)).all(axis=1)).any():
            stop(f"{path}, line {wrong.idxmax() + 2}: r, g and b must be whole numbers from 0 to 255")
        self.names = [name for name in table["name"].unique() if name not in ignored]
        numbers = [IGNORE if name in ignored else self.names.index(name) for name in table["name"]]
        self._by_color, self._by_number = np.full(1 << 24, _UNKNOWN, np.uint8), np.full(256, _UNKNOWN, np.uint8)
        self._by_color[colors.to_numpy(int) @ [1 << 16, 1 << 8, 1]] = numbers
        self._by_number[: len(numbers)], self._by_number[IGNORE] = numbers, IGNORE

    def read(self, path: Path) -> np.ndarray:
        """A mask as the number of each pixel's class, or IGNORE."""
        with Image.open(path) as image:
            if image.mode in ("L", "P"):
                pixels = np.asarray(image)
                mask = self._by_number[pixels]
            else:
                pixels = np.asarray(image.convert("RGB"))
                mask = self._by_color[pixels.astype(int) @ [1 << 16, 1 << 8, 1]]
        if (unknown := mask == _UNKNOWN).any():
            stop(f"{path} has pixels of {pixels[unknown][0].tolist()}, which no line of classes.csv is")
        return mask


def find_pairs(folder: Path, part: str) -> list[tuple[Path, Path]]:
    """The images of a folder such as train, with the masks of train_labels (or trainannot), of the same sizes."""
    masks = next((folder / f"{part}{end}" for end in ("_labels", "annot") if (folder / f"{part}{end}").is_dir()), None)
    if masks is None or not (folder / part).is_dir():
        stop(f"{folder} must have the folders {part} and {part}_labels, for images and masks")
    pairs = []
    for image in sorted(path for path in (folder / part).iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg")):
        mask = next(
            (masks / f"{image.stem}{end}" for end in ("_L.png", ".png") if (masks / f"{image.stem}{end}").is_file()),
            None,
        )
        if mask is None:
            stop(f"{image} has no mask {image.stem}.png or {image.stem}_L.png in {masks}")
        with Image.open(image) as one, Image.open(mask) as other:
            if one.size != other.size:
                sizes = [f"{width} × {height}" for width, height in (one.size, other.size)]
                stop(f"{image} has {sizes[0]} pixels, but its mask {mask.name} {sizes[1]}: they must be alike")
        pairs.append((image, mask))
    if not pairs:
        stop(f"{folder / part} has no .png or .jpg images")
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
