"""Decoding an image file into a uint8 tensor of the size that a model takes."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from efficient_densenet._extras import need
from efficient_densenet._images import to_8bit

if TYPE_CHECKING:
    from PIL.Image import Image


class UndecodableImage(ValueError):  # noqa: N818 - what it is
    """An image file that is damaged, or none."""


def decode(path: Path, image_size: int, channels: int = 3) -> Tensor:
    """The central square of the image, resized to (channels, image_size, image_size), uint8."""
    pillow = need("PIL.Image", extra="demos")
    try:
        with pillow.open(path) as opened:
            image = _square(to_8bit(opened, channels), image_size)
            raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as exc:
        reason = "it cannot be identified" if isinstance(exc, pillow.UnidentifiedImageError) else str(exc)
        raise UndecodableImage(
            f"{path} is not an image that can be decoded ({reason}): replace it or remove it"
        ) from exc
    return raw.view(image_size, image_size, channels).permute(2, 0, 1).contiguous()


def _square(image: "Image", size: int) -> "Image":
    """Center-crop to a square and resize it to `size`."""
    width, height = image.size
    if (width, height) != (size, size):
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        bilinear = need("PIL.Image", extra="demos").Resampling.BILINEAR
        image = image.resize((size, size), bilinear, box=(left, top, left + side, top + side))
    return image
