"""What an image is before it is resized for a model: upright, with 8 bits a channel."""

from typing import TYPE_CHECKING

from ._extras import need

if TYPE_CHECKING:
    from PIL.Image import Image


def to_8bit(image: "Image", channels: int) -> "Image":
    """The image in gray or, for three channels, in color: 16 bits scaled to 8, turned as its EXIF orientation says."""
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {image.mode}, whose white level is not known: convert them to 8 bits")
    upright = need("PIL.ImageOps", extra="demos").exif_transpose(image)
    upright.info.pop("transparency", None)  # about which converting would warn
    if upright.mode.startswith("I;16"):
        upright = upright.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
    return upright.convert("RGB" if channels == 3 else "L")
