"""Batches of pictures made ready where they lie: cropped, mirrored and normalised, all of a batch at once.

Random numbers are drawn on the CPU for a whole step at a time and depend on nothing but the seed, the epoch and the
step. So a run goes on after an interruption as if there had been none, on any device and in any number of processes.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .images import Pictures, Streamed


def generator_for(*numbers: int) -> torch.Generator:
    """A random stream of its own for these numbers (a seed, an epoch, …)."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class Draw:
    """What chance decides about the pictures of a step: where each is cropped (2 × N) and whether it is mirrored."""

    offsets: Tensor
    mirrored: Tensor

    def __getitem__(self, part: slice) -> "Draw":
        return Draw(self.offsets[:, part], self.mirrored[part])


@dataclass(frozen=True)
class Preparation:
    """How pictures become a model's input: the colours' mean and spread, of 255, and what training varies."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    distance: int
    mirror: bool

    def draw(self, number: int, generator: torch.Generator) -> Draw:
        offsets = torch.randint(2 * self.distance + 1, (2, number), generator=generator)
        mirrored = torch.rand(number, generator=generator) < 0.5
        return Draw(offsets, mirrored & self.mirror)

    def vary(self, images: Tensor, draw: Draw) -> Tensor:
        """Each picture moved by up to `distance` pixels, what comes in black, and mirrored or not."""
        cropped = crop(images, draw.offsets, self.distance)
        if not self.mirror:
            return cropped
        mirrored = draw.mirrored.to(images.device)[:, None, None, None]
        return torch.where(mirrored, cropped.flip(3), cropped)

    def normalise(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        mean = torch.tensor(self.mean, dtype=dtype, device=images.device)[:, None, None]
        std = torch.tensor(self.std, dtype=dtype, device=images.device)[:, None, None]
        return images.to(dtype).sub_(mean).div_(std)


def crop(images: Tensor, offsets: Tensor, distance: int) -> Tensor:
    """Each picture of the batch after a border of `distance` black pixels, cut from its own row and column."""
    height, width = images.shape[2:]
    windows = F.pad(images, (distance,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    rows, columns = offsets.to(images.device)
    return windows[torch.arange(len(images), device=images.device), :, rows, columns]


def preparation_for(pictures: Pictures | Streamed, mirror: bool, most: int = 10_000) -> Preparation:
    """Normalisation by the pictures' own colours (by `most` of them, evenly spread), and crops by an eighth."""
    chosen = torch.linspace(0, len(pictures) - 1, min(len(pictures), most)).round().long()
    sums = squares = count = 0
    for images, _ in pictures.fetch(chosen.split(100)):
        values = images.cpu().double().transpose(0, 1).flatten(1)
        sums, squares, count = sums + values.sum(1), squares + values.square().sum(1), count + values.shape[1]
    mean = sums / count
    std = (squares / count - mean.square()).clamp(min=1).sqrt()  # one grey everywhere is centred and not enlarged
    return Preparation(tuple(mean.tolist()), tuple(std.tolist()), images.shape[-1] // 8, mirror)
