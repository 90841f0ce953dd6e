"""One picture file as a uint8 tensor of the size that a model takes."""

from pathlib import Path

import torch
from torch import Tensor

from ..._extras import need


def decode(path: Path, image_size: int, channels: int = 3) -> Tensor:
    """The middle of the picture, its shorter side made `image_size` long; channels × size × size."""
    image = need("PIL.Image", extra="demos")
    try:
        with image.open(path) as opened:
            if opened.mode in ("I", "F"):
                raise ValueError(f"its pixels are of mode {opened.mode}, whose white is not known")
            picture = _squared(_upright(opened).convert("RGB" if channels == 3 else "L"), image_size)
            raw = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as exc:
        reason = "it cannot be identified" if isinstance(exc, image.UnidentifiedImageError) else str(exc)
        raise ValueError(f"{path} is not a picture that can be decoded ({reason}): replace it or remove it") from exc
    return raw.view(image_size, image_size, channels).permute(2, 0, 1).contiguous()


def _upright(picture):
    """As a camera held it, in 8 bits, and without a transparency that converting would lose with a warning."""
    need("PIL.ImageOps", extra="demos").exif_transpose(picture, in_place=True)
    picture.info.pop("transparency", None)
    if picture.mode.startswith("I;16"):
        return picture.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
    return picture


def _squared(picture, size: int):
    width, height = picture.size
    if (width, height) != (size, size):
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        bilinear = need("PIL.Image", extra="demos").Resampling.BILINEAR
        picture = picture.resize((size, size), bilinear, box=(left, top, left + side, top + side))
    return picture
