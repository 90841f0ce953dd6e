"""Image files, and their preparation for a model: the central square, upright, with 8 bits a channel."""

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


def open_image(path: str | Path, channels: int) -> "Image":
    """The image in a file, as by `to_8bit`."""
    pillow = need("PIL.Image", extra="weights")
    try:
        with pillow.open(path, formats=sorted(set(FORMATS.values()))) as opened:
            return to_8bit(opened, channels)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as exc:
        reason = (
            "it cannot be identified" if isinstance(exc, pillow.UnidentifiedImageError) else " ".join(f"{exc}".split())
        )
        raise UndecodableImage(f"{path} is not an image that can be decoded ({reason}): replace or remove it") from exc


def to_8bit(image: "Image", channels: int) -> "Image":
    """The image in gray or, for three channels, in RGB: scaled from 16 bits to 8, and rotated by its EXIF
    orientation."""
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {image.mode}, whose white level is not known: convert them to 8 bits")
    upright = need("PIL.ImageOps", extra="weights").exif_transpose(image)
    upright.info.pop("transparency", None)  # convert() would warn about it
    if upright.mode.startswith("I;16"):
        upright = upright.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
    return upright.convert("RGB" if channels == 3 else "L")


def central_square(image: "Image", size: int) -> Tensor:
    """The central square of an image of 8 bits, resized to (channels, size, size), uint8."""
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    if image.size != (size, size):
        bilinear = need("PIL.Image", extra="weights").Resampling.BILINEAR
        image = image.crop((left, top, left + side, top + side)).resize((size, size), bilinear)
    raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return raw.view(size, size, -1).permute(2, 0, 1)
