"""Sets of labelled pictures: small ones as one uint8 tensor on the device, large ones read from their files."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from .decode import Undecodable, decode, ignore_interrupts


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
        loader = torch.utils.data.DataLoader(
            _Files(self.paths, self.image_size),
            batch_sampler=[index.tolist() for index in indices],
            num_workers=self.workers,
            collate_fn=list,
            worker_init_fn=ignore_interrupts if self.workers else None,
            generator=torch.Generator(),  # or it would draw from, and so change, the run's own random numbers
        )
        for index, images in zip(indices, loader, strict=True):
            for image in images:
                if isinstance(image, Undecodable):
                    image.refuse()
            yield torch.stack(images).to(self.device), self.labels[index].to(self.device)


@dataclass(frozen=True)
class _Files(torch.utils.data.Dataset):
    paths: Sequence[Path]
    image_size: int

    def __getitem__(self, number: int) -> Tensor | Undecodable:
        return decode(self.paths[number], self.image_size)


@contextlib.contextmanager
def lost_workers() -> Iterator[None]:
    """A sentence for a worker that the system ended. A signal tells of it, wherever the main process is just then."""
    try:
        yield
    except RuntimeError as exc:
        if not str(exc).startswith("DataLoader worker"):
            raise
        raise ChildProcessError(
            "a process that decodes pictures was ended from outside, perhaps for want of memory: "
            "give fewer --workers, and go on with --resume"
        ) from exc


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
