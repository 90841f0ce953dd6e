"""Image files, and their preparation for a model: the central square, upright, with all bits that a file has."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._extras import need

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {
    **dict.fromkeys((".jpg", ".jpeg"), "JPEG"),
    **dict.fromkeys((".ppm", ".pgm"), "PPM"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    ".png": "PNG",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".webp": "WEBP",
}
"""Pillow's formats by the suffixes of image files. It opens no others, since some of them start programs."""


class UndecodableImage(ValueError):  # noqa: N818 - what it is
    """An image file that is damaged, or none."""


def image_files(path: Path) -> list[Path]:
    """The file itself, or the images in a folder and below it."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder: give the path of an image, or of a folder of images")
    found = sorted(each for each in path.rglob("*") if each.suffix.lower() in FORMATS and each.is_file())
    if not found:
        raise ValueError(f"{path} contains no images: give a folder with files such as {', '.join(sorted(FORMATS))}")
    return found


@contextlib.contextmanager
def open_image(path: str | Path) -> "Iterator[Image]":
    """The image in a file; what fails in decoding or preparing it is an error that names the file."""
    pillow = need("PIL.Image", extra="weights")
    try:
        with pillow.open(path, formats=sorted(set(FORMATS.values()))) as opened:
            yield opened
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as exc:
        reason = (
            "it cannot be identified" if isinstance(exc, pillow.UnidentifiedImageError) else " ".join(f"{exc}".split())
        )
        raise UndecodableImage(f"{path} is not an image that can be decoded ({reason}): replace or remove it") from exc


def is_deep(image: "Image") -> bool:
    """Whether an image has more than 8 bits a channel."""
    return image.mode == "F" or image.mode.startswith("I")


def to_channels(image: "Image", channels: int, value_range: tuple[float, float] | None = None) -> "Image":
    """The image upright, in gray or, for three channels, in RGB.

    Gray images of more than 8 bits stay float32, in one channel, with `value_range` scaled to 0 to 255. By default
    that is the range that the file declares.
    """
    if not is_deep(image) and ";16" in str(getattr(image, "tile", "")):
        raise ValueError("it has 16 bits a channel in color, of which Pillow reads 8: convert it to 8 bits or to gray")
    upright = need("PIL.ImageOps", extra="weights").exif_transpose(image)
    if not is_deep(image):
        upright.info.pop("transparency", None)  # convert() would warn about it
        return upright.convert("RGB" if channels == 3 else "L")
    if value_range is None and not (image.mode.startswith("I;16") or image.format == "PPM"):
        raise ValueError(f"its pixels are of mode {image.mode}, whose white level is not known: convert them to 8 bits")
    low, high = value_range or (0, 65535)
    scale = 255 / (high - low)
    return upright.convert("F").point(lambda value: value * scale - low * scale)


def to_tensor(image: "Image") -> Tensor:
    """An image of `to_channels` as (channels, height, width), uint8 or float32."""
    dtype = torch.float32 if image.mode == "F" else torch.uint8
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=dtype)
    return pixels.view(image.height, image.width, -1).permute(2, 0, 1)


def central_square(image: "Image", size: int) -> Tensor:
    """The central square of an image of `to_channels`, resized to (channels, size, size)."""
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    if image.size != (size, size):
        bilinear = need("PIL.Image", extra="weights").Resampling.BILINEAR
        image = image.crop((left, top, left + side, top + side)).resize((size, size), bilinear)
    return to_tensor(image)
