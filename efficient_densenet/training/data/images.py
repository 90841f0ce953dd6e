"""Sets of labelled images: small ones as one uint8 tensor on the device, large ones decoded from their files."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from .prefetch import decode_batches


@dataclass(frozen=True)
class Images:
    """Images in memory: `images` are uint8 (N, C, H, W), `labels` class indices (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "Images":
        return Images(self.images[index], self.labels[index])

    def to(self, device: torch.device) -> "Images":
        return Images(self.images.to(device), self.labels.to(device))

    def fetch(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each batch of indices."""
        for indices in batches:
            indices = indices.to(self.labels.device)
            yield self.images[indices], self.labels[indices]


@dataclass(frozen=True)
class StreamedImages:
    """Images that are decoded from their files batch by batch; `workers` processes prefetch them."""

    paths: Sequence[Path]
    labels: Tensor
    image_size: int
    workers: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "StreamedImages":
        indices = torch.arange(len(self))[index]
        return replace(self, paths=[self.paths[i] for i in indices.tolist()], labels=self.labels[index])

    def to(self, device: torch.device) -> "StreamedImages":
        return replace(self, device=device)

    def fetch(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each batch of indices, in order."""
        decoded = decode_batches(self.paths, self.image_size, batches, self.workers)
        for indices, images in zip(batches, decoded, strict=True):
            yield images.to(self.device, copy=True), self.labels[indices].to(self.device)


ImageSet = Images | StreamedImages


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
