"""Sets of labelled images: small ones as tensors on the device, large ones decoded from files by a DataLoader."""

import hashlib
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from efficient_densenet._images import UndecodableImage


@dataclass(frozen=True)
class Images:
    """Images in memory: `images` are uint8 or float32, (N, C, H, W), `labels` class indices (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "Images":
        return Images(self.images[index], self.labels[index])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def to(self, device: torch.device) -> "Images":
        return Images(self.images.to(device), self.labels.to(device))

    def fetch(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each batch of indices."""
        for indices in batches:
            indices = indices.to(self.labels.device)
            yield self.images[indices], self.labels[indices]


@dataclass(frozen=True)
class StreamedImages:
    """Images of a `torch.utils.data.Dataset` of image files, decoded batch by batch in `workers` processes.

    `indices` are those of the files in this set; the decoded images have `image_shape`.
    """

    files: Any
    indices: Tensor
    image_shape: tuple[int, int, int]
    workers: int
    device: torch.device

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Tensor | slice) -> "StreamedImages":
        return replace(self, indices=self.indices[index])

    def to(self, device: torch.device) -> "StreamedImages":
        return replace(self, device=device)

    def fetch(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each batch of indices, in order."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more than processors wait for files
            decoded = iter(
                DataLoader(
                    self.files,
                    batch_sampler=[self.indices[batch].tolist() for batch in batches],
                    num_workers=self.workers,
                    worker_init_fn=_leave_signals_to_the_main_process,
                    generator=torch.Generator(),  # or it would draw from the one of the run
                )
            )
        try:
            for images, labels in decoded:
                yield images.to(self.device), labels.to(self.device)
        except UndecodableImage as exc:  # a worker puts its traceback before the sentence
            exc.__traceback__ = decoded = None  # the last references to the iterator, which ends its workers now
            raise UndecodableImage(str(exc).strip().rpartition("UndecodableImage: ")[2]) from None


ImageSet = Images | StreamedImages


def _leave_signals_to_the_main_process(worker: int) -> None:
    """A terminal or a scheduler sends signals to all processes: the main one ends its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


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
