"""Decoding batches of image files ahead of their use, in processes that share memory with this one.

The operating system may kill a process at any moment, most often for lack of memory. PyTorch's DataLoader then raises
from a signal handler, wherever the main thread happens to be; if that is in the middle of acquiring a lock, the run
hangs. A ProcessPoolExecutor reports the loss as an exception of the pending result instead.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..machine import check_memory
from .decode import decode

Task = tuple[int, list[int]]
"""The buffer for a batch, and the indices of its images."""

DecodedBatch = tuple[int, int]
"""The buffer that was filled, and the number of images in it."""


def decode_batches(paths: Sequence[Path], image_size: int, batches: Sequence[Tensor], workers: int) -> Iterator[Tensor]:
    """Decode each batch of indices, in order, in `workers` processes, or in this one if there are none.

    Yields views of buffers that are reused: a caller that keeps a batch copies it.
    """
    batch_size = max((len(batch) for batch in batches), default=0)
    check_buffers(image_size, batch_size, workers)
    num_buffers = _num_buffers(workers)
    buffers = torch.empty(num_buffers, batch_size, 3, image_size, image_size, dtype=torch.uint8)
    cancelled = torch.zeros(1, dtype=torch.bool)
    tasks = ((number % num_buffers, batch.tolist()) for number, batch in enumerate(batches))
    if workers:
        decoded = _decode_in_processes(
            workers, (paths, _to_shared_memory(buffers), _to_shared_memory(cancelled)), tasks
        )
    else:
        decoded = (_decode_batch(paths, buffers, cancelled, *task) for task in tasks)
    for buffer, count in decoded:
        yield buffers[buffer, :count]


def _num_buffers(workers: int) -> int:
    return max(1, 2 * workers)


def check_buffers(image_size: int, batch_size: int, workers: int) -> None:
    """Raise if the machine has no memory for the batches that `decode_batches` holds."""
    count = _num_buffers(workers)
    check_memory(
        count * batch_size * 3 * image_size**2,
        f"{count} batches of {batch_size} images of {image_size}×{image_size}",
        "give a smaller --image_size or --batch_size, or fewer --workers",
    )


def _to_shared_memory(tensor: Tensor) -> Tensor:
    try:
        return tensor.share_memory_()
    except RuntimeError as exc:
        raise MemoryError(
            f"found too little shared memory for {tensor.nbytes >> 20} MiB of prefetched images: "
            "give fewer --workers or none (0), or a container with more of it (--shm-size)"
        ) from exc


def _decode_in_processes(
    workers: int, shared: tuple[Sequence[Path], Tensor, Tensor], tasks: Iterator[Task]
) -> Iterator[DecodedBatch]:
    """Decode `tasks` in order. A yielded buffer may be refilled as soon as the next one is requested."""
    _, buffers, cancelled = shared
    executor = ProcessPoolExecutor(workers, initializer=_init_worker, initargs=shared)
    try:
        pending = deque(executor.submit(_run_task, *task) for task in islice(tasks, len(buffers)))
        while pending:
            yield pending.popleft().result()
            pending.extend(executor.submit(_run_task, *task) for task in islice(tasks, 1))
    except BrokenProcessPool as exc:
        raise ChildProcessError(
            "a process that decodes images was killed, perhaps for lack of memory: "
            "give fewer --workers, and continue with --resume"
        ) from exc
    finally:
        cancelled[0] = True
        executor.shutdown(cancel_futures=True)


def _decode_batch(
    paths: Sequence[Path], buffers: Tensor, cancelled: Tensor, buffer: int, indices: list[int]
) -> DecodedBatch:
    for image, index in zip(buffers[buffer, : len(indices)], indices, strict=True):
        if not cancelled:
            image.copy_(decode(paths[index], buffers.shape[-1]))
    return buffer, len(indices)


_shared: tuple[Sequence[Path], Tensor, Tensor]
"""In a worker process: all paths, the buffers, and whether decoding was cancelled."""


def _run_task(buffer: int, indices: list[int]) -> DecodedBatch:
    return _decode_batch(*_shared, buffer, indices)


def _init_worker(*shared: Any) -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal: the main process ends its workers, and they end with
    it even if it is killed."""
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # one thread per worker: PyTorch's thread pool does not survive a fork
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
