"""Sets of labelled images: small ones as one uint8 tensor on the device, large ones decoded from their files."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from .decode import decode_batches


@dataclass(frozen=True)
class Images:
    """Images in memory: `images` are uint8 (N, C, H, W), `labels` class indices (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "Images":
        return Images(self.images[index], self.labels[index])

    def with_channels(self, channels: int) -> "Images":
        return Images(to_channels(self.images, channels), self.labels)

    def to(self, device: torch.device) -> "Images":
        return Images(self.images.to(device), self.labels.to(device))

    def fetch(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each batch of indices."""
        for indices in batches:
            indices = indices.to(self.labels.device)
            yield self.images[indices], self.labels[indices]


@dataclass(frozen=True)
class StreamedImages:
    """Images that are decoded from their files batch by batch; `workers` processes prefetch them.

    Decoded images have three channels; with `channels` 1 they are made gray afterwards.
    """

    paths: Sequence[Path]
    labels: Tensor
    image_size: int
    workers: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    channels: int = 3

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "StreamedImages":
        indices = torch.arange(len(self))[index]
        return replace(self, paths=[self.paths[i] for i in indices.tolist()], labels=self.labels[index])

    def with_channels(self, channels: int) -> "StreamedImages":
        return replace(self, channels=channels)

    def to(self, device: torch.device) -> "StreamedImages":
        return replace(self, device=device)

    def fetch(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each batch of indices, in order."""
        decoded = decode_batches(self.paths, self.image_size, batches, self.workers)
        for indices, images in zip(batches, decoded, strict=True):
            yield to_channels(images.to(self.device, copy=True), self.channels), self.labels[indices].to(self.device)


ImageSet = Images | StreamedImages


def to_channels(images: Tensor, channels: int) -> Tensor:
    """uint8 images (N, 1 or 3, H, W) in so many channels: views that repeat a gray one, or the luminance of colors."""
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    if images.shape[1] == channels:
        return images
    red, green, blue = 19595, 38470, 7471  # ITU-R 601-2 in 16 bits, as in Pillow
    gray = [
        (part[:, 0].int() * red + part[:, 1].int() * green + part[:, 2].int() * blue + 2**15 >> 16).to(torch.uint8)
        for part in images.split(1000)  # of which the integers take four times the memory
    ]
    return torch.cat(gray)[:, None]


def digest(parts: Iterable[bytes | Tensor]) -> str:
    """A short hash of these contents, in hexadecimal."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(part.cpu().flatten().numpy().data if isinstance(part, Tensor) else part)
    return hashed.hexdigest()


def random_split(images: ImageSet, held_out: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """The rest and `held_out` images, chosen by the seed alone."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images[order[held_out:]], images[order[:held_out]]
