"""The pictures: kept as one uint8 tensor, made into batches where they lie."""

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor


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


@dataclass(frozen=True)
class Splits:
    """What a run trains on, chooses its best epoch by, and is judged by in the end."""

    train: Pictures
    valid: Pictures
    test: Pictures

    def to(self, device: torch.device) -> "Splits":
        return Splits(self.train.to(device), self.valid.to(device), self.test.to(device))


def load_digits() -> Pictures:
    """The UCI handwritten digits that ship with the package, enlarged to 32×32: 1,797 pictures, one channel."""
    source = resources.files(__package__) / "digits.csv.gz"
    with source.open("rb") as packed, gzip.open(packed, "rt", newline="") as text:
        rows = torch.tensor([[int(value) for value in row] for row in csv.reader(text)])
    images = rows[:, :-1].reshape(-1, 1, 8, 8).float() * (255 / 16)
    images = F.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    return Pictures(images.round().to(torch.uint8), rows[:, -1])


def split(pictures: Pictures, test_share: float = 0.2, valid_share: float = 0.1, seed: int = 0) -> Splits:
    """Set aside a share for the test and a share of the rest for validation; the seed alone decides which."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed))
    num_test = round(len(pictures) * test_share)
    num_valid = round((len(pictures) - num_test) * valid_share)
    test, valid, train = order.split([num_test, num_valid, len(pictures) - num_test - num_valid])
    return Splits(pictures[train], pictures[valid], pictures[test])


def batches(
    pictures: Pictures, batch_size: int, generator: torch.Generator | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised batches, in order; with a generator shuffled and shifted, and without the small rest."""
    if generator is None:
        order = torch.arange(len(pictures))
    else:
        order = torch.randperm(len(pictures), generator=generator)
        order = order[: max(len(order) // batch_size, 1) * batch_size]
    for index in order.split(batch_size):
        batch = pictures[index.to(pictures.labels.device)]
        images = batch.images.float() / 127.5 - 1
        yield (images if generator is None else shift(images, 4, generator)), batch.labels


def shift(images: Tensor, distance: int, generator: torch.Generator) -> Tensor:
    """Move every picture by up to `distance` pixels each way, on its own; what comes in has the darkest value."""
    n, _, height, width = images.shape
    padded = F.pad(images, (distance,) * 4, value=-1.0)
    offsets = torch.randint(2 * distance + 1, (2, n), generator=generator).to(images.device)
    rows = offsets[0, :, None] + torch.arange(height, device=images.device)
    columns = offsets[1, :, None] + torch.arange(width, device=images.device)
    picture = torch.arange(n, device=images.device)
    return padded.permute(0, 2, 3, 1)[picture[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
