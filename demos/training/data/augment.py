"""Augmentation and normalization of whole batches, on the device that holds the images.

The random parameters of a step are drawn on the CPU, for the global batch at once, from a generator that is seeded by
the seed of the run, the epoch and the step alone. A resumed run therefore repeats them exactly, on any device and with
any number of processes. (`torchvision.transforms.v2` draws one crop for a whole batch, from the global generator.)
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from .images import ImageSet


def generator_for(*key: int) -> torch.Generator:
    """A generator seeded by a hash of `key`, such as (seed, epoch, step)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class Transform:
    """From uint8 images to the input of a model: random crop and horizontal flip in training, normalization always.

    Args:
        mean: mean of each channel, of 0 to 255.
        std: standard deviation of each channel.
        padding: pixels that are padded on each side before a random crop of the original size.
        horizontal_flip: whether half of the training images are flipped.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 0
    horizontal_flip: bool = False

    def sample_params(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """The random parameters of a batch (3, N): the row and column of each crop, and whether it is flipped."""
        offsets = torch.randint(2 * self.padding + 1, (2, batch_size), generator=generator)
        flips = torch.rand(batch_size, generator=generator) < 0.5
        return torch.cat([offsets, flips[None] & self.horizontal_flip])

    def augment(self, images: Tensor, params: Tensor) -> Tensor:
        """Crop each zero-padded image at its own offset, and flip it or not."""
        height, width = images.shape[2:]
        windows = F.pad(images, (self.padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
        rows, columns, flips = params.to(images.device)
        cropped = windows[torch.arange(len(images), device=images.device), :, rows, columns]
        return torch.where(flips.bool()[:, None, None, None], cropped.flip(3), cropped)

    def normalize(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return transforms.normalize(images.to(dtype), list(self.mean), list(self.std), inplace=True)


def transform_for(images: ImageSet, horizontal_flip: bool, max_images: int = 10_000) -> Transform:
    """A transform with the mean and std of `images`, and crops that shift by up to an eighth of the width.

    The statistics are those of at most `max_images` evenly spaced images.
    """
    size = images.image_shape[-1]
    batch_size = min(100, max(1, 2**25 // size**2))  # of large images fewer, since their values are float64
    indices = torch.linspace(0, len(images) - 1, min(len(images), max_images)).round().long()
    sums = squares = torch.zeros(1, dtype=torch.float64)
    count = 0
    for batch, _ in images.fetch(indices.split(batch_size)):
        values = batch.cpu().double().transpose(0, 1).flatten(1)
        sums, squares, count = sums + values.sum(1), squares + values.square().sum(1), count + values.shape[1]
    mean = sums / count
    std = (squares / count - mean.square()).clamp(min=1).sqrt()  # at least 1: a constant channel is not amplified
    return Transform(tuple(mean.tolist()), tuple(std.tolist()), size // 8, horizontal_flip)
