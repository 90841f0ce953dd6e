"""Decoding image files into uint8 tensors of the size that a model takes, in batches that a DataLoader prefetches."""

import signal
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from efficient_densenet._extras import need
from efficient_densenet._images import to_8bit

from ..machine import check_memory

if TYPE_CHECKING:
    from PIL.Image import Image


class UndecodableImage(ValueError):  # noqa: N818 - what it is
    """An image file that is damaged, or none."""


def decode(path: Path, image_size: int, channels: int = 3) -> Tensor:
    """The central square of the image, resized to (channels, image_size, image_size), uint8."""
    pillow = need("PIL.Image", extra="demos")
    try:
        with pillow.open(path) as opened:
            image = _square(to_8bit(opened, channels), image_size)
            raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as exc:
        reason = "it cannot be identified" if isinstance(exc, pillow.UnidentifiedImageError) else str(exc)
        raise UndecodableImage(
            f"{path} is not an image that can be decoded ({reason}): replace it or remove it"
        ) from exc
    return raw.view(image_size, image_size, channels).permute(2, 0, 1).contiguous()


def _square(image: "Image", size: int) -> "Image":
    """Center-crop to a square and resize it to `size`."""
    width, height = image.size
    if (width, height) != (size, size):
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        bilinear = need("PIL.Image", extra="demos").Resampling.BILINEAR
        image = image.resize((size, size), bilinear, box=(left, top, left + side, top + side))
    return image


def decode_batches(paths: Sequence[Path], image_size: int, batches: Sequence[Tensor], workers: int) -> Iterator[Tensor]:
    """Decode each batch of indices, in order, in `workers` processes, or in this one if there are none."""
    check_prefetched(image_size, max((len(batch) for batch in batches), default=0), workers)
    # Once a worker is killed, DataLoader's handler of SIGCHLD raises wherever the main thread happens to be; without
    # it the next batch is what raises.
    handler = signal.getsignal(signal.SIGCHLD)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than processors wait for files
        loader = DataLoader(
            _ImageFiles(paths, image_size),
            batch_size=None,
            sampler=[batch.tolist() for batch in batches],
            num_workers=workers,
            collate_fn=_unchanged,
            worker_init_fn=_ignore_ctrl_c,
            generator=torch.Generator(),  # or it would draw from the one of the run
        )
        decoded = iter(loader)
    signal.signal(signal.SIGCHLD, handler)
    worker_was_killed = False
    try:
        for images in decoded:
            if isinstance(images, Exception):
                raise images
            yield images
    except (RuntimeError, OSError, EOFError) as exc:
        if type(exc) is RuntimeError and "DataLoader worker" not in str(exc):
            raise
        worker_was_killed = True  # to be reported once the exception, whose frames keep the other workers, is gone
    finally:
        del decoded  # which ends its workers
    if worker_was_killed:
        raise ChildProcessError(
            "a process that decodes images was killed, perhaps for lack of memory: "
            "give fewer --workers, and continue with --resume"
        )


def check_prefetched(image_size: int, batch_size: int, workers: int) -> None:
    """Raise if the machine has no memory for the batches that `decode_batches` holds."""
    count = max(1, 2 * workers)
    check_memory(
        count * batch_size * 3 * image_size**2,
        f"{count} batches of {batch_size} images of {image_size}×{image_size}",
        "give a smaller --image_size or --batch_size, or fewer --workers",
    )


class _ImageFiles(Dataset):
    """Batches by the lists of their indices. An error is returned: raised in a worker, it would become a traceback."""

    def __init__(self, paths: Sequence[Path], image_size: int) -> None:
        self.paths, self.image_size = paths, image_size

    def __getitem__(self, indices: list[int]) -> Tensor | Exception:
        try:
            images = torch.stack([decode(self.paths[i], self.image_size) for i in indices])
        except UndecodableImage as exc:
            return exc
        try:
            return images.share_memory_() if get_worker_info() else images
        except RuntimeError:
            return MemoryError(
                f"found too little shared memory for prefetched batches of {images.nbytes >> 20} MiB: "
                "give fewer --workers or none (0), or a container with more of it (--shm-size)"
            )


def _unchanged(images: Any) -> Any:
    return images


def _ignore_ctrl_c(worker: int) -> None:
    """It reaches every process of a terminal: the main process ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
