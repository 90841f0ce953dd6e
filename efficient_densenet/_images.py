"""Preparing an image to be resized for a model: upright, with 8 bits a channel."""

from typing import TYPE_CHECKING

from ._extras import need

if TYPE_CHECKING:
    from PIL.Image import Image


def to_8bit(image: "Image", channels: int) -> "Image":
    """The image in gray or, for three channels, in RGB: scaled from 16 bits to 8, and rotated by its EXIF
    orientation."""
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {image.mode}, whose white level is not known: convert them to 8 bits")
    upright = need("PIL.ImageOps", extra="demos").exif_transpose(image)
    upright.info.pop("transparency", None)  # convert() would warn about it
    if upright.mode.startswith("I;16"):
        upright = upright.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
    return upright.convert("RGB" if channels == 3 else "L")
