"""Pictures decoded ahead of their use, by processes that share memory with this one.

A process may be ended by the system at any moment, most often for want of memory. PyTorch's DataLoader then raises from
a signal handler, wherever the main thread is just then; where that was taking a lock, the run stands still for good.
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

from .decode import decode

Task = tuple[int, list[int]]
"""A place for a batch, and the numbers of its pictures."""

Filled = tuple[int, int]
"""The place, and how many pictures are there."""


def decoded(paths: Sequence[Path], image_size: int, batches: Sequence[Tensor], workers: int) -> Iterator[Tensor]:
    """Each batch in turn, decoded by so many processes, or by this one. Who wants to keep it copies it: a later batch
    takes its place."""
    places = max(1, 2 * workers)
    largest = max((len(batch) for batch in batches), default=0)
    room = torch.empty(places, largest, 3, image_size, image_size, dtype=torch.uint8)
    over = torch.zeros(1, dtype=torch.bool)
    tasks = ((number % places, batch.tolist()) for number, batch in enumerate(batches))
    if workers:
        filled = _filled_by_processes(workers, (paths, _shared_by_all(room), _shared_by_all(over)), tasks)
    else:
        filled = (_fill(paths, room, over, *task) for task in tasks)
    for place, count in filled:
        yield room[place, :count]


def _shared_by_all(tensor: Tensor) -> Tensor:
    try:
        return tensor.share_memory_()
    except RuntimeError as exc:
        raise MemoryError(
            f"found too little shared memory for {tensor.nbytes >> 20} MiB of pictures that are decoded ahead: "
            "give fewer --workers or none (0), or a container more of it (--shm-size)"
        ) from exc


def _filled_by_processes(
    workers: int, shared: tuple[Sequence[Path], Tensor, Tensor], tasks: Iterator[Task]
) -> Iterator[Filled]:
    """The places that were filled; asked for the next, it gives the last away."""
    _, room, over = shared
    processes = ProcessPoolExecutor(workers, initializer=_begin, initargs=shared)
    try:
        asked = deque(processes.submit(_fill_shared, *task) for task in islice(tasks, len(room)))
        while asked:
            yield asked.popleft().result()
            asked.extend(processes.submit(_fill_shared, *task) for task in islice(tasks, 1))
    except BrokenProcessPool as exc:
        raise ChildProcessError(
            "a process that decodes pictures was ended from outside, perhaps for want of memory: "
            "give fewer --workers, and go on with --resume"
        ) from exc
    finally:
        over[0] = True
        processes.shutdown(cancel_futures=True)


def _fill(paths: Sequence[Path], room: Tensor, over: Tensor, place: int, numbers: list[int]) -> Filled:
    for image, number in zip(room[place, : len(numbers)], numbers, strict=True):
        if not over:  # or nobody waits for them any more
            image.copy_(decode(paths[number], room.shape[-1]))
    return place, len(numbers)


_shared: tuple[Sequence[Path], Tensor, Tensor]
"""In a process that decodes: all paths, where the pictures go, and whether it is over."""


def _fill_shared(place: int, numbers: list[int]) -> Filled:
    return _fill(*_shared, place, numbers)


def _begin(*shared: Any) -> None:
    """Ctrl-C reaches every process of a terminal, and the main one decides what becomes of the others. They end with
    it, however it ends."""
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # there are many of them, and PyTorch's own threads do not outlive a fork
    threading.Thread(target=_end_with_the_main_process, daemon=True).start()


def _end_with_the_main_process() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
