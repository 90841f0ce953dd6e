"""Sets of labelled pictures: small ones as one uint8 tensor on the device, large ones read from their files."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from .prefetch import decoded


@dataclass(frozen=True)
class Pictures:
    """`images` are uint8, N × channels × height × width; `labels` are class numbers."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "Pictures":
        return Pictures(self.images[index], self.labels[index])

    def to(self, device: torch.device) -> "Pictures":
        return Pictures(self.images.to(device), self.labels.to(device))

    def fetch(self, indices: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels for each index in turn."""
        for index in indices:
            index = index.to(self.labels.device)
            yield self.images[index], self.labels[index]


@dataclass(frozen=True)
class Streamed:
    """Pictures that stay in their files until a batch needs them; `workers` processes decode ahead."""

    paths: Sequence[Path]
    labels: Tensor
    image_size: int
    workers: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "Streamed":
        numbers = torch.arange(len(self))[index]
        return replace(self, paths=[self.paths[i] for i in numbers], labels=self.labels[index])

    def to(self, device: torch.device) -> "Streamed":
        return replace(self, device=device)

    def fetch(self, indices: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels for each index in turn, decoded in the order they are asked for."""
        decoding = decoded(self.paths, self.image_size, indices, self.workers)
        for index, images in zip(indices, decoding, strict=True):
            yield images.to(self.device, copy=True), self.labels[index].to(self.device)


def digest(parts: Iterable[bytes | Tensor]) -> str:
    """A few letters that stand for these contents."""
    digested = hashlib.blake2b(digest_size=8)
    for part in parts:
        digested.update(part.cpu().contiguous().numpy() if isinstance(part, Tensor) else part)
    return digested.hexdigest()


def split_off(pictures: Pictures | Streamed, number: int, seed: int) -> tuple:
    """The rest and `number` pictures set aside; the seed alone decides which."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed))
    aside, rest = order[:number], order[number:]
    return pictures[rest], pictures[aside]
