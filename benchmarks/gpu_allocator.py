"""What PyTorch's CUDA allocator reserves for training steps, with expandable segments and without. No GPU is needed.

    python benchmarks/gpu_allocator.py --model densenet_bc_100_12 --batch_size 256
    python benchmarks/gpu_allocator.py --page docs/memory.md

The allocator takes segments from the driver and keeps them: what it reserves is more than what tensors hold, by the
parts of segments that no tensor fits. The allocations of a step, seen on the meta device, are replayed in a model of
the allocator's rules. cuDNN's workspaces are not among them.
"""

import bisect
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_trace import trace_step
from methods import architecture
from options import run_command
from pages import rewritten

from efficient_densenet import DenseNet

MIB = 2**20
ROUNDING, SMALL = 512, MIB
"""Sizes are rounded up; those up to SMALL have segments of their own, as c10/cuda/CUDACachingAllocator.cpp has it."""
SMALL_SEGMENT, LARGE_SEGMENT, LARGE, LARGE_ROUNDING = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
"""A tensor of LARGE or more gets a segment of its own size, others of LARGE_SEGMENT, in which expandable ones grow."""

Event = tuple[int, int]
"""The number of a tensor, and the bytes that it allocates; 0 for its end."""


@dataclass
class Block:
    """A part of a segment, with its neighbors there."""

    size: int
    address: int
    is_free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass
class Pool:
    """The segments of small tensors, or of large ones."""

    is_small: bool
    expandable: bool
    reserved: int = 0
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    """Sorted by size, then by address."""
    last: Block | None = None
    """The end of the expandable segment."""

    def allocate(self, size: int) -> Block:
        i = bisect.bisect_left(self.free, (size,))
        if i + 1 < len(self.free) and self.free[i][2] is self.last:
            i += 1  # the end can grow, and counts as larger than all others
        block = self.free.pop(i)[2] if i < len(self.free) else self._new_block(size)
        block.is_free = False
        rest = block.size - size
        if rest >= ROUNDING if self.is_small or self.expandable else rest > SMALL:
            block.size = size
            self._release(Block(rest, block.address + size, before=block, after=block.after))
        return block

    def release(self, block: Block) -> None:
        """Make a block free, joined with its free neighbors."""
        for neighbor in (block.before, block.after):
            if neighbor is not None and neighbor.is_free:
                self.free = [each for each in self.free if each[2] is not neighbor]
                block.size += neighbor.size
                if neighbor is block.before:
                    block.before, block.address = neighbor.before, neighbor.address
                else:
                    block.after = neighbor.after
        self._release(block)

    def _release(self, block: Block) -> None:
        block.is_free = True
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        elif self.expandable:
            self.last = block
        bisect.insort(self.free, (block.size, block.address, block), key=lambda each: each[:2])

    def _new_block(self, size: int) -> Block:
        """A segment, or the end of the expandable one after it has grown."""
        if not self.expandable:
            of_its_own = -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
            segment = SMALL_SEGMENT if self.is_small else LARGE_SEGMENT if size < LARGE else of_its_own
            block = Block(segment, self.reserved)
            self.reserved += segment
            return block
        end, page = self.last, SMALL_SEGMENT if self.is_small else LARGE_SEGMENT
        if end is not None and end.is_free:
            self.free = [each for each in self.free if each[2] is not end]
        else:
            end = Block(0, self.reserved, before=end)
            if end.before is not None:
                end.before.after = end
        grown = -(-(size - end.size) // page) * page
        end.size += grown
        self.reserved += grown
        self.last = end
        return end


class Allocator:
    """PyTorch's, for one stream."""

    def __init__(self, expandable: bool) -> None:
        self.pools = [Pool(is_small, expandable) for is_small in (False, True)]
        self.blocks: dict[int, tuple[Pool, Block, int]] = {}
        """Of each tensor, with the bytes that it needs of its block."""
        self.allocated = self.peak = 0

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools)

    def replay(self, events: Iterable[Event]) -> None:
        for number, size in events:
            if size:
                size = -(-size // ROUNDING) * ROUNDING
                pool = self.pools[size <= SMALL]
                self.blocks[number] = pool, pool.allocate(size), size
                self.allocated += size
                self.peak = max(self.peak, self.allocated)
            else:
                pool, block, size = self.blocks.pop(number)
                self.allocated -= size
                pool.release(block)


def reserved(model: str, engine: str, shapes: Iterable[tuple[int, int]], expandable: bool) -> Allocator:
    """The allocator after training steps on batches of (images, size), whose gradients are None before each."""
    allocator, network = Allocator(expandable), _network(model, engine)
    held = [*network.parameters(), *network.buffers()]
    allocator.replay((-1 - i, max(1, tensor.nbytes)) for i, tensor in enumerate(held))
    for batch_size, size in shapes:
        allocator.replay([(number, 0) for number in allocator.blocks if number >= 0])  # the last step's gradients
        allocator.replay(_events(model, engine, batch_size, size))
    return allocator


@functools.cache
def _events(model: str, engine: str, batch_size: int, size: int) -> list[Event]:
    network = _network(model, engine)
    with torch.device("meta"):
        images = torch.empty(batch_size, 3, size, size)
    return [(0, images.nbytes), *trace_step(network, images, "tf32").events]


def _network(model: str, engine: str) -> DenseNet:
    with torch.device("meta"):
        return DenseNet(**architecture(model), efficient=engine)


SCHEDULES = {
    "all batches alike": lambda batch, size: [(batch, size)] * 3,
    "the last batch of an epoch smaller": lambda batch, size: [(batch, size), (batch * 5 // 8, size)] * 3,
    "images of four sizes": lambda batch, size: [(batch, size * part // 8) for part in (5, 8, 6, 7)] * 3,
}


def count(model: Any = "densenet_bc_100_12", batch_size: int = 256, image_size: int = 0, page: str = "") -> None:
    """Print what tensors hold at most, and what is reserved for them.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>.
        batch_size: number of images.
        image_size: height and width of the images. Default: 32 for models for CIFAR, 224 for ImageNet.
        page: a document in which what its commands print is written again.
    """
    if page:
        Path(page).write_text(rewritten_page(Path(page).read_text()))
    else:
        print(_table(model, batch_size, image_size))


def rewritten_page(text: str) -> str:
    """A document with what its commands print now."""
    return rewritten(text, "gpu_allocator.py", count, _table)


def _table(model: str = "densenet_bc_100_12", batch_size: int = 256, image_size: int = 0) -> str:
    size = image_size or (32 if architecture(model).get("small_inputs", True) else 224)
    lines = [
        "",
        f"{model}, {batch_size} images of {size}×{size}, MiB:",
        "",
        "| steps | engine | tensors | reserved | with expandable segments |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, shapes in SCHEDULES.items():
        for engine in ("plain", "shared"):
            usual, expandable = (reserved(model, engine, shapes(batch_size, size), each) for each in (False, True))
            row = (
                name,
                f"`{engine}`",
                *(f"{each / MIB:,.0f}" for each in (usual.peak, usual.reserved, expandable.reserved)),
            )
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    run_command(count)
