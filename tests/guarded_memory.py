"""Runs the Numba kernels with protected pages beside each tensor and each part of the scratch memory: for a process of
its own, which an access out of bounds ends."""

import ctypes
import itertools
import math
import mmap

import torch

from efficient_densenet.kernels.comparison import OPERATIONS, Case
from efficient_densenet.kernels.numba_cpu.compiler.compilation import ARITHMETIC
from efficient_densenet.kernels.numba_cpu.host import operations, tiling

GUARD = 64 * mmap.PAGESIZE
SMALL_TILES = [((1, 2, 2), 2, 1), ((1, 3, 7), 17, 33), ((2, 5, 9), 48, 12), ((1, 3, 2, 5), 31, 47)]
ONE_TILE = [
    ((1, 2, 2 * rows), channels, width) for rows in (1, 20, 98) for channels, width in ((2, 17), (48, 64), (300, 40))
]

libc = ctypes.CDLL(None)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
layouts = {}


def protected(length, guards):
    """Bytes of new memory in which a guard begins at each of these places."""
    whole = torch.frombuffer(mmap.mmap(-1, length), dtype=torch.uint8)
    for start in guards:
        assert libc.mprotect(whole.data_ptr() + start, GUARD, 0) == 0
    return whole


def guarded(shape, dtype):
    """A tensor: a guard lies before its page and right after its last element."""
    size = math.prod(shape) * dtype.itemsize
    stop = GUARD + max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
    return protected(stop + GUARD, (0, stop))[stop - size : stop].view(dtype).view(shape)


def new_empty(self, *shape, dtype=None):
    return guarded(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape, dtype or self.dtype)


def places(*sizes):
    """The offsets of the scratch memory's parts, each followed by a guard. The total tells `new_scratch` the layout."""
    stops, end = [], 0
    sizes = [-(-size // 4) * 4 for size in sizes]  # a part that no kernel uses may have any size
    for size in sizes:
        stops.append(end + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        end = stops[-1] + GUARD
    starts = [stop - size for stop, size in zip(stops, sizes, strict=True)]
    total = 8 * (end + len(layouts))
    layouts[total] = starts[0], stops, end
    return [start - starts[0] for start in starts] + [total]


def new_scratch(tiles, like):
    start, stops, end = layouts[tiles.scratch_bytes]
    return protected(end, stops)[start:].view(ARITHMETIC[like.dtype])


def run(threads, tile, sizes):
    torch.set_num_threads(threads)
    tiling.TILE = tile
    for dtype, (operation, function) in itertools.product((torch.bfloat16, torch.float32), OPERATIONS.items()):
        for shape, channels, width in sizes:
            case = Case(shape, channels, width, dtype)
            for name, tensor in vars(case).items():
                if isinstance(tensor, torch.Tensor):
                    setattr(case, name, guarded(tensor.shape, tensor.dtype).copy_(tensor))
            print(dtype, operation, shape, channels, width, flush=True)
            function(operations, case)


def main():
    torch.Tensor.new_empty = new_empty
    torch.empty_like = lambda tensor, dtype=None, memory_format=None: guarded(tensor.shape, dtype or tensor.dtype)
    torch.zeros = lambda *shape, dtype, device: guarded(shape, dtype).fill_(0)
    operations.new_scratch, tiling._places = new_scratch, places
    run(1, tiling.TILE, ONE_TILE)
    run(2, 24, SMALL_TILES)
    print("all")


if __name__ == "__main__":
    main()
