"""What an operation of ATen and a Triton kernel ask of a GPU: launches, and bytes moved through memory.

For ATen's operations the rules are these, which tests/test_gpu_counts.py checks:

- A view or an allocation costs no launch and no bytes.
- Other operations are one launch. They read every input once and write every output once; of an expanded tensor they
  touch what is in memory. An operation in place reads and writes its tensor, unless it only fills it.
- A batch norm in training mode reads its input twice: for the statistics, then to normalize. Its backward reads the
  input and grad_output twice.
- A convolution's backward is one launch for each gradient; both read grad_output.
- A concatenation is one launch for each 128 tensors.
- A foreach operation is one launch for each chunk of its tensors: at most 110 tensors with one list, 64 with two, 48
  with three, 36 with four, 30 with five, and at most 320 blocks of 65,536 numbers.
- What an operation does within, such as cuDNN's workspaces and conversions of layout, is not seen.

For Triton kernels `KERNELS` says it by name and argument. A kernel moves the bytes that it touches: of a slice of a
matrix's channels only its columns. A matrix that is not listed is an error, and so is a kernel that is not listed:
whoever writes a kernel adds it here.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
VIEWS = {"_unsafe_view", "_reshape_alias", "lift_fresh"}
"""Views whose schemas do not say so."""
FILLS = {"copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_"}
"""Operations in place that do not read what they replace."""
BATCH_NORMS = {"native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward"}
READ_TWICE = {"input", "grad_out", "grad_output"}
"""The arguments of a batch norm in training mode that are read for the sums first."""
CAT_TENSORS, FOREACH_TENSORS, FOREACH_BLOCKS, FOREACH_BLOCK = 128, (110, 64, 48, 36, 30), 320, 65_536

L2_BYTES = 50 << 20
"""The L2 cache of an H200 (NVIDIA H100 Tensor Core GPU Architecture whitepaper), for which bytes are counted."""


class Call:
    """An operation of ATen, its arguments and its output."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.args, self.output, self.schema, self.name = args, output, func._schema, func.overloadpacket.__name__
        named = {argument.name: argument for argument in self.schema.arguments}
        by_position = zip(self.schema.arguments, args, strict=False)
        self.arguments = [*by_position, *((named[name], value) for name, value in kwargs.items())]

    @property
    def is_free(self) -> bool:
        """Whether it is an allocation, or a view: its results are an input's memory, unchanged."""
        aliases = [each.alias_info for each in self.schema.returns]
        is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        return is_view or self.name in ALLOCATIONS | VIEWS

    def launches(self) -> int:
        if self.name == "convolution_backward":
            return sum(self.arguments[-1][1])
        if self.name in ("slice_backward", "select_backward"):
            return 2  # zeros, and a copy
        if self.name in ("cat", "stack"):
            return -(-len(self.args[0]) // CAT_TENSORS)
        if self.name.startswith("_foreach_"):
            return self._foreach_launches()
        return 1

    def bytes(self) -> int:
        return sum(touched_bytes(tensor) * times for tensor, times in self._accesses())

    def _accesses(self) -> Iterator[tuple[Tensor, int]]:
        """Each tensor, and how often it is read or written."""
        if self.name == "convolution_backward":
            grad_output, x, weight, *_, output_mask = (value for _, value in self.arguments)
            for needed, factor, grad in zip(output_mask, (weight, x, None), self.output, strict=True):
                yield from ((each, 1) for each in (grad_output, factor, grad) if needed and each is not None)
            return
        trains = self.name in BATCH_NORMS and any(
            value for argument, value in self.arguments if argument.name in ("train", "training")
        )
        for argument, value in self.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            read = not argument.is_out and not (written and self.name in FILLS)
            times = read * (2 if trains and argument.name in READ_TWICE else 1) + written
            yield from ((tensor, times) for tensor in tensors_of(value))
        returns = self.schema.returns
        for returned, value in zip(returns, self.output if len(returns) > 1 else [self.output], strict=False):
            if returned.alias_info is None:
                yield from ((tensor, 1) for tensor in tensors_of(value))

    def _foreach_launches(self) -> int:
        lists = [tensors_of(value) for _, value in self.arguments if isinstance(value, list | tuple)]
        lists = [each for each in lists if each]
        depth = len(lists) + (not self.schema.is_mutable)  # a list of results
        most = FOREACH_TENSORS[min(depth, len(FOREACH_TENSORS)) - 1]
        blocks = sum(-(-tensor.numel() // FOREACH_BLOCK) for tensor in lists[0])
        return max(-(-len(lists[0]) // most), -(-blocks // FOREACH_BLOCKS))


def tensors_of(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def touched_bytes(tensor: Tensor) -> int:
    """The bytes in memory that hold the tensor: an expanded dimension has one copy."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


class Traffic(NamedTuple):
    """The bytes that a launch moves through a GPU's memory, its L2 cache and its L1 caches."""

    memory: int
    l2: int
    l1: int


Grid, Arguments = tuple[int, ...], Mapping[str, Any]
"""Of a launch. The arguments, by name, are compile-time constants too."""


class Access(NamedTuple):
    """How a launch reads an argument and writes it.

    `reads` and `writes` are how often all of it is read and written by the program instances that share it. The
    instances of the grid axes `every` each read all that the others read: `every=(1,)` is an operand that each
    instance of axis 1 reads. `loads`, if not once, is how often instances load it beside that, as the L2 cache sees it
    and as L1 caches see it.

    L1 caches see all loads and stores. The L2 cache sees none that an instance repeats, as if L1 caches served those.
    Memory sees what several instances read only once, unless the argument is larger than the L2 cache, and then once
    for axis 0: its instances start one after another and find in the cache what their neighbours have read.

    `accumulates` marks a result that is read too, unless the kernel is launched with OVERWRITE. `only_with` names a
    constant without which the kernel does not use the argument, in whose place any other tensor may stand.
    """

    reads: int = 0
    writes: int = 0
    every: tuple[int, ...] = ()
    loads: Callable[[Grid, Arguments], tuple[float, float]] = lambda grid, arguments: (1, 1)
    accumulates: bool = False
    only_with: str = ""

    def traffic(self, tensor: Tensor, grid: Grid, arguments: Arguments) -> Traffic:
        if self.only_with and not arguments.get(self.only_with, True):
            return Traffic(0, 0, 0)
        nbytes = tensor.numel() * tensor.element_size()
        reads = self.reads + (self.accumulates and not arguments.get("OVERWRITE", False))
        in_memory = math.prod(grid[axis] for axis in self.every if axis > 0) if nbytes > L2_BYTES else 1
        instances, in_caches = math.prod(grid[axis] for axis in self.every), self.loads(grid, arguments)
        times = in_memory, *(instances * each for each in in_caches)
        return Traffic(*(round(nbytes * (reads * each + self.writes)) for each in times))


def launch_traffic(name: str, grid: Grid, arguments: Arguments) -> Traffic:
    """The bytes that a launch moves."""
    if name not in KERNELS:
        raise ValueError(
            f"the Triton kernel {name!r} is not in KERNELS: add to benchmarks/gpu_kernels.py what it reads and writes"
        )
    total = Traffic(0, 0, 0)
    for argument, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            continue
        if argument not in KERNELS[name] and tensor.dim() > 1:
            raise ValueError(
                f"the matrix {argument!r} of the Triton kernel {name!r} is not in KERNELS: say in "
                "benchmarks/gpu_kernels.py how the kernel uses it"
            )
        access = KERNELS[name].get(argument) or KERNELS[name].get("vectors", READ)
        total = Traffic(*map(sum, zip(total, access.traffic(tensor, grid, arguments), strict=True)))
    return total


def _window(spans: float, tiles: float, taps: float, arguments: Arguments) -> tuple[float, float]:
    """Loads of a 3×3 convolution's operand by its taps: `taps` a pixel. A tile of rows is a span of pixels; each of
    `tiles` tiles of the other axis loads one for each row of the window, `spans` in all, which overlap where the image
    is narrow. Neighboring tiles of rows load them too, so that only the overlap is in an L1 cache."""
    shift = min(1, arguments["dilation"] * arguments["width"] / arguments["BLOCK_ROWS"])
    return min(taps, tiles + (spans - tiles) * shift), taps


def _inside(arguments: Arguments) -> tuple[float, float]:
    """How many of a window's rows, and of its columns, are inside the image: the mean over all pixels."""
    rows, columns = (3 - 2 * min(1, arguments["dilation"] / arguments[size]) for size in ("height", "width"))
    return rows, columns


def _forward_window(grid: Grid, arguments: Arguments) -> tuple[float, float]:
    """A tile is loaded for each row of the window, with what it overlaps its neighbors, or for each tap."""
    rows, columns = _inside(arguments)
    if not arguments["SHIFT_SUMS"]:
        return _window(3, 1, rows * columns, arguments)
    overlap = 1 + 2 * arguments["dilation"] * (grid[0] - 1) / arguments["num_rows"]
    in_l2, in_l1 = _window(3, 1, rows, arguments)
    return in_l2 * overlap, in_l1 * overlap


def _forward_steps(grid: Grid, arguments: Arguments) -> tuple[float, float]:
    return 1, 3 if arguments["SHIFT_SUMS"] else 9


def _grad_input_window(grid: Grid, arguments: Arguments) -> tuple[float, float]:
    return _window(3, 1, math.prod(_inside(arguments)), arguments)


def _grad_weight_window(grid: Grid, arguments: Arguments) -> tuple[float, float]:
    """The tiles of columns, (tap, output channel), share the taps."""
    width, block = arguments["OUT_CHANNELS"], arguments["BLOCK_COLUMNS"]
    spans = {(column // block, column // width // 3, column % width) for column in range(9 * width)}
    tiles = {(column // block, column % width) for column in range(9 * width)}
    return _window(len(spans) / width, len(tiles) / width, math.prod(_inside(arguments)), arguments)


def _means_twice(grid: Grid, arguments: Arguments) -> tuple[float, float]:
    return 1, 1.5


def _row_tiles(grid: Grid, arguments: Arguments) -> tuple[float, float]:
    """Once for each tile of rows of an instance."""
    return 1, math.ceil(arguments["num_rows"] / arguments["BLOCK_ROWS"]) / grid[1]


def _pooled_pixels(grid: Grid, arguments: Arguments) -> tuple[float, float]:
    """Once for each window that a pixel is in. What neighboring tiles load too is neglected."""
    return 1, math.prod(arguments[f"KERNEL_{axis}"] / arguments[f"STRIDE_{axis}"] for axis in "YX")


def _pooling_window(grid: Grid, arguments: Arguments) -> tuple[float, float]:
    return 1, arguments["KERNEL_Y"] * arguments["KERNEL_X"]


READ, WRITE, ACCUMULATE = Access(reads=1), Access(writes=1), Access(writes=1, accumulates=True)
BY_SPLITS, BY_ROW_TILES = Access(reads=1, every=(1,)), Access(reads=1, every=(0,))
BY_ALL = Access(reads=1, every=(0, 1))


KERNELS: dict[str, dict[str, Access]] = {
    "affine_activation_pool_forward": {"output": WRITE, "values": READ, "vectors": BY_SPLITS},
    "affine_activation_pool_backward": {
        "partial_sums": WRITE,
        "grad_accum": ACCUMULATE,
        "grad_output": READ,
        "values": READ,
        "vectors": BY_SPLITS,
    },
    "batch_norm_grad_input": {
        "output": WRITE,
        "grad_accum": READ,
        "values": READ,
        "sums": BY_SPLITS,
        "vectors": BY_SPLITS,
    },
    "conv1x1_forward": {
        "output": WRITE,
        "stats": Access(writes=1, only_with="WITH_STATISTICS"),
        "values": READ,
        "weight": BY_ROW_TILES,
        "vectors": BY_ROW_TILES,
    },
    "conv1x1_backward": {
        "partial_grad_weight": WRITE,
        "partial_sums": WRITE,
        "grad_accum": ACCUMULATE,
        "output": Access(reads=1, every=(0,), only_with="HAS_SUMS"),  # by the tiles of channels, one after another
        "output_grad_accum": Access(reads=1, every=(0,)),
        "out_mean": BY_ALL,
        "out_inv_std": BY_ALL,
        "out_sums": Access(reads=1, every=(0, 1), only_with="HAS_SUMS"),
        "values": READ,
        "weight": BY_SPLITS,
        "vectors": BY_SPLITS,
    },
    "conv3x3_forward": {
        "output": WRITE,
        "stats": Access(writes=1, only_with="HAS_STATISTICS"),
        "values": Access(reads=1, every=(1,), loads=_forward_window),
        "weight": BY_ROW_TILES,
        "vectors": Access(reads=1, every=(0, 1), loads=_forward_steps),
    },
    "conv3x3_grad_input": {
        "partial_sums": WRITE,
        "grad_accum": ACCUMULATE,
        "grad_output": Access(reads=1, every=(0,), loads=_grad_input_window),
        "values": READ,
        "weight": Access(reads=1, every=(1,), loads=_row_tiles),
        "vectors": BY_SPLITS,
    },
    "conv3x3_grad_weight": {
        "partial_grad_weight": WRITE,
        "grad_output": Access(reads=1, every=(1,), loads=_grad_weight_window),
        "values": Access(reads=1, every=(0,)),
        "vectors": Access(reads=1, every=(0, 2)),
    },
    "finish_backward": {
        "grad_norm_bias": WRITE,
        "grad_norm_weight": WRITE,
        "grad_activation_weight": WRITE,
        "grad_weight": Access(writes=1, only_with="HAS_GRAD_WEIGHT"),
        "sums": Access(reads=1, writes=1, only_with="HAS_SUMS"),
        "partial_sums": READ,
        "partial_grad_weight": Access(reads=1, only_with="HAS_GRAD_WEIGHT"),
    },
    "tile_statistics": {"stats": WRITE, "values": READ},
    "combine_statistics": {"result": WRITE, "stats": Access(reads=1, loads=_means_twice)},
    "image_statistics": {"stats": WRITE, "values": READ},
    "norm_activation_max_pool_forward": {
        "output": WRITE,
        "values": Access(reads=1, loads=_pooled_pixels),
        "vectors": BY_ROW_TILES,
    },
    "norm_activation_max_pool_backward_reduce": {
        "indices": WRITE,
        "partial_sums": WRITE,
        "grad_output": READ,
        "values": Access(reads=1, loads=_pooled_pixels),
        "vectors": BY_SPLITS,
    },
    "norm_activation_max_pool_backward": {
        "grad_values": WRITE,
        "indices": Access(reads=1, loads=_pooling_window),
        "grad_output": Access(reads=1, loads=_pooling_window),
        "values": READ,
        "vectors": BY_ROW_TILES,
    },
}
"""By kernel and argument; `vectors` are those of its arguments that are not named."""
