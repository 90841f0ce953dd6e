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
matrix's channels only its columns. Vectors that are not listed are read once: a few hundred numbers, which every
program instance finds in the L2 cache. A matrix that is not listed is an error, and so is a kernel that is not listed:
whoever writes a kernel adds it here.
"""

import math
from collections.abc import Iterator, Mapping
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


class Access(NamedTuple):
    """How often the whole grid reads an argument and writes it.

    `again_for` is the grid axis for each tile of which an operand larger than the L2 cache is read again. Axis 0 is
    never named: its program instances start one after another and find in the cache what their neighbours have read.
    `accumulates` marks a result that is read too, unless the kernel is launched with OVERWRITE. `only_with` names a
    constant without which the kernel does not use the argument, in whose place any other tensor may stand.
    """

    reads: int = 0
    writes: int = 0
    again_for: int | None = None
    accumulates: bool = False
    only_with: str = ""

    def bytes(self, tensor: Tensor, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> int:
        """The bytes that a launch moves between memory and this argument."""
        if self.only_with and not arguments.get(self.only_with, True):
            return 0
        nbytes = tensor.numel() * tensor.element_size()
        reads = self.reads + (self.accumulates and not arguments.get("OVERWRITE", False))
        if self.again_for is not None and nbytes > L2_BYTES:
            reads *= grid[self.again_for]
        return (reads + self.writes) * nbytes


READ, WRITE, ACCUMULATE = Access(reads=1), Access(writes=1), Access(writes=1, accumulates=True)


def launch_bytes(name: str, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> int:
    """The bytes that a launch moves; `arguments` are its arguments and compile-time constants by name."""
    if name not in KERNELS:
        raise ValueError(
            f"the Triton kernel {name!r} is not in KERNELS: add to benchmarks/gpu_kernels.py what it reads and writes"
        )
    total = 0
    for argument, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            continue
        if argument not in KERNELS[name] and tensor.dim() > 1:
            raise ValueError(
                f"the matrix {argument!r} of the Triton kernel {name!r} is not in KERNELS: say in "
                "benchmarks/gpu_kernels.py how the kernel uses it"
            )
        total += KERNELS[name].get(argument, READ).bytes(tensor, grid, arguments)
    return total


KERNELS: dict[str, dict[str, Access]] = {
    "affine_activation_pool_forward": {"output": WRITE, "values": READ},
    "affine_activation_pool_backward": {
        "partial_sums": WRITE,
        "grad_accum": ACCUMULATE,
        "grad_output": READ,
        "values": READ,
    },
    "batch_norm_grad_input": {"output": WRITE, "grad_accum": READ, "values": READ, "sums": READ},
    "conv1x1_forward": {
        "output": WRITE,
        "stats": Access(writes=1, only_with="WITH_STATISTICS"),
        "values": READ,
        "weight": READ,
    },
    "conv1x1_backward": {
        "partial_grad_weight": WRITE,
        "partial_sums": WRITE,
        "grad_accum": ACCUMULATE,
        "grad_output": READ,  # by the tiles of channels, grid axis 0, one after another
        "output": Access(reads=1, only_with="HAS_SUMS"),
        "output_grad_accum": READ,
        "out_sums": Access(reads=1, only_with="HAS_SUMS"),
        "values": READ,
        "weight": Access(reads=1, again_for=1),
    },
    "conv3x3_forward": {
        "output": WRITE,
        "stats": Access(writes=1, only_with="HAS_STATISTICS"),
        "values": Access(reads=1, again_for=1),  # for each tap, from a cache
        "weight": READ,
    },
    "conv3x3_grad_input": {
        "partial_sums": WRITE,
        "grad_accum": ACCUMULATE,
        "grad_output": READ,
        "values": READ,
        "weight": Access(reads=1, again_for=1),
    },
    "conv3x3_grad_weight": {"partial_grad_weight": WRITE, "grad_output": Access(reads=1, again_for=1), "values": READ},
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
    "combine_statistics": {"result": WRITE, "stats": Access(reads=2)},
    "image_statistics": {"stats": WRITE, "values": READ},
    "norm_activation_max_pool_forward": {"output": WRITE, "values": READ},
    "norm_activation_max_pool_backward_reduce": {
        "indices": WRITE,
        "partial_sums": WRITE,
        "grad_output": READ,
        "values": READ,
    },
    "norm_activation_max_pool_backward": {"grad_values": WRITE, "indices": READ, "grad_output": READ, "values": READ},
}
