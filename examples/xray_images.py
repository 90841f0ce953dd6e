"""X-ray files with all bits that they have: PNG, JPEG and TIFF by Pillow, DICOM by pydicom."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _extra import need
from common import counted, first_line, stop
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from tqdm import tqdm

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".dcm")
SAMPLE = 1000
"""How many files, evenly spaced, are read to measure the values in them."""
Range = tuple[float, float]


class Pixels(NamedTuple):
    """Values (height, width) and those before the file's own window, the bits of each, what the file says is black and
    white, and whether less is brighter."""

    values: np.ndarray
    unwindowed: np.ndarray
    bits: int
    declared: Range | None
    inverted: bool = False

    def scaled(self, options: argparse.Namespace) -> np.ndarray:
        """Values from 0 for black to 1 for white, float32."""
        low, high = (options.window if self.bits > 8 else None) or self.declared or options.range
        scaled = ((self.values - low) / (high - low)).clip(0, 1).astype(np.float32)
        return 1 - scaled if self.inverted else scaled


def check_header(path: str | Path) -> None:
    if str(path).lower().endswith(".dcm"):
        _dicom(path, with_pixels=False)
    else:
        with Image.open(path) as image:
            _check_bits(image)


def _check_bits(image: Image.Image) -> None:
    if ";16" in str(getattr(image, "tile", "")) and not image.mode.startswith("I"):
        raise ValueError("16 bits a channel in color, of which Pillow reads 8: convert it to gray")


def _dicom(path: str | Path, with_pixels: bool = True) -> Any:
    need("pydicom")
    import pydicom
    from pydicom.pixels import get_decoder

    data = pydicom.dcmread(path, stop_before_pixels=not with_pixels)
    if int(data.get("NumberOfFrames") or 1) > 1:
        raise ValueError(f"it has {data.NumberOfFrames} frames, but one picture a file is needed")
    if (kind := data.get("PhotometricInterpretation")) not in ("MONOCHROME1", "MONOCHROME2"):
        raise ValueError(f"its photometric interpretation is {kind}, but must be MONOCHROME1 or MONOCHROME2")
    syntax = data.file_meta.TransferSyntaxUID
    if syntax.is_compressed and not get_decoder(syntax).is_available:
        raise ValueError(f"compressed as {syntax.name}, for which no decoder is installed: pip install pylibjpeg[all]")
    return data


def read_pixels(path: str | Path, has_window: bool) -> Pixels:
    """The pixels of a file; those of a DICOM file by its own window, unless there is another one."""
    if not str(path).lower().endswith(".dcm"):
        with Image.open(path) as image:
            _check_bits(image)
            if image.mode == "F" or image.mode.startswith("I"):
                declared = (0, 65535) if image.format == "PPM" else None
                values = np.asarray(image.convert("F"))
                return Pixels(values, values, 16 if "16" in image.mode else 32, declared)
            values = np.asarray(image.convert("L"))
            return Pixels(values, values, 8, (0, 255))
    data = _dicom(path)
    from pydicom.pixels import apply_modality_lut, apply_voi_lut

    bits, is_signed = int(data.BitsStored), int(data.PixelRepresentation)
    ends = np.array([0, 2**bits - 1]) - is_signed * 2 ** (bits - 1)
    unwindowed, ends = (apply_modality_lut(each, data) for each in (data.pixel_array, ends))
    values = unwindowed
    if not has_window and ("WindowCenter" in data or "VOILUTSequence" in data):
        values = apply_voi_lut(values, data)
        ends = apply_voi_lut(np.array([-(2**31), 2**31 - 1]), data)
    low, high = sorted(map(float, ends))
    return Pixels(
        values.astype(np.float32), unwindowed, bits, (low, high), data.PhotometricInterpretation == "MONOCHROME1"
    )


def read(path: str | Path, options: argparse.Namespace) -> Tensor:
    """A picture in the channels of the model: uint8, or float32 from 0 to 1 where the file has more than 8 bits."""
    pixels = read_pixels(path, bool(options.window))
    values = pixels.values if pixels.bits == 8 and pixels.declared == (0, 255) else pixels.scaled(options)
    return torch.from_numpy(np.array(values)).expand(options.channels, -1, -1)


def measure(files: list[str], options: argparse.Namespace) -> None:
    """Print how many bits the files have and how many pixels are black and white, and set the range of those that
    declare none. Stop where too many pixels of different values become black or white."""
    bits, shares = dict[int, int](), list[np.ndarray]()
    undeclared = list[tuple[float, float, float, float]]()  # least and greatest value, and how many pixels have them
    for file in tqdm(files[:: -(-len(files) // SAMPLE)], "measuring", leave=False):
        try:
            pixels = read_pixels(file, bool(options.window))
        except Exception as error:  # of a file whose header is sound
            print(f"note: {file} cannot be read ({first_line(error)})")
            continue
        bits[pixels.bits] = bits.get(pixels.bits, 0) + 1
        if pixels.declared or options.window or options.range:
            scaled = pixels.scaled(options)
            ends = scaled == 0, scaled == 1
            lost = [end.mean() if end.any() and np.ptp(pixels.unwindowed[end]) else 0 for end in ends]
            shares.append(np.array([*(end.mean() for end in ends), *lost]))
        else:
            low, high = float(pixels.values.min()), float(pixels.values.max())
            undeclared.append((low, high, (pixels.values == low).mean(), (pixels.values == high).mean()))
    if undeclared:
        least, greatest = min(low for low, *_ in undeclared), max(high for _, high, *_ in undeclared)
        options.range = [least, greatest if greatest > least else least + 1]
        for low, high, at_low, at_high in undeclared:
            shares.append(np.array([at_low * (low == least), at_high * (high == greatest), 0, 0]))
    if not bits:
        stop(f"not one of {counted(len(files), 'picture')} for training can be read: give others")
    black, white, *lost = np.mean(shares, axis=0)
    kinds = ", ".join(f"{counted(count, 'file')} of {n} bits" for n, count in sorted(bits.items()))
    ends = " from {:g} (black) to {:g} (white)".format(*options.range) if options.range else ""
    print(f"pixels: {kinds}{ends}; {black:.1%} are black, {white:.1%} white")
    if max(bits) > 8 and max(lost) > options.max_clipped:
        end = "black" if lost[0] > lost[1] else "white"
        stop(f"{max(lost):.0%} of the pixels have different values in the files, but would all be {end}: give another "
             "--window, or a larger --max_clipped")  # fmt: skip


class XRays(Dataset):
    """Pictures, and their labels as a row of numbers: 1, 0, or NaN where it is not known."""

    def __init__(self, files: list[str], targets: Tensor, options: argparse.Namespace, augment: bool = False) -> None:
        self.files, self.targets, self.options = files, targets, options
        mean, std = ([0.449], [0.226]) if options.channels == 1 else ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        if options.model == "torchxrayvision":  # pixels from -1024 to 1024
            mean, std = [0.5] * options.channels, [1 / 2048] * options.channels
        steps = [v2.Resize(options.image_size), v2.CenterCrop(options.image_size)]
        if augment:  # without a flip: the heart is on the left
            steps.append(v2.RandomAffine(5, (0.05, 0.05), (0.9, 1.1), interpolation=v2.InterpolationMode.BILINEAR))
        self.transform = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.transform(read(self.files[i], self.options)), self.targets[i]
