"""The transform from an image to a model's input, equal to the preparation of the images for training."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._images import central_square, to_channels


@dataclass(frozen=True)
class ImageTransform:
    """The central square of an image, resized and normalized.

    Args:
        image_size: height and width of the model's input.
        mean: mean of each channel, of 0 to 255.
        std: standard deviation of each channel.
        value_range: values that count as 0 and 255 in images of more than 8 bits; by default what a file declares.
    """

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    value_range: tuple[float, float] | None = None

    def __call__(self, image: Any) -> Tensor:
        """Prepare a PIL image, or a uint8 tensor (C, H, W) or (N, C, H, W); one gray channel counts as all channels."""
        channels = len(self.mean)
        if isinstance(image, Tensor):
            images, dtypes = image, (torch.uint8,)
        else:
            images = central_square(to_channels(image, channels, self.value_range), self.image_size)
            dtypes = (torch.uint8, torch.float32)
        if images.dtype not in dtypes or images.dim() not in (3, 4) or images.shape[-3] not in (1, channels):
            raise ValueError(
                f"found an image of shape {tuple(images.shape)} and {images.dtype}, but these weights need uint8 with "
                f"{channels} channels, ({channels}, H, W) or (N, {channels}, H, W): convert it, or give a PIL image"
            )
        height, width = images.shape[-2:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = images[..., top : top + side, left : left + side].float()
        if side != self.image_size:
            batch = square.reshape(-1, *square.shape[-3:])
            resized = F.interpolate(batch, size=(self.image_size,) * 2, mode="bilinear", antialias=True)
            square = resized.round_().clamp_(0, 255).view(*images.shape[:-2], *resized.shape[-2:])
        values = square.expand(*images.shape[:-3], channels, -1, -1)
        mean, std = (values.new_tensor(numbers)[:, None, None] for numbers in (self.mean, self.std))
        return (values - mean) / std
