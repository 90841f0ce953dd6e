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

For Triton kernels `KERNELS` has what each writes; every other tensor is read once, as if caches served whatever program
instances share. Of a slice of a matrix's channels only its columns are moved. A kernel that is not listed is an error:
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
    """How a Triton kernel uses its tensors; those that are not named here are read once.

    `accumulates` are results that are read too, unless the kernel is launched with OVERWRITE. `only_with` names the
    constant without which an argument is not used: any other tensor may stand in its place.
    """

    writes: tuple[str, ...] = ()
    accumulates: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    only_with: Mapping[str, str] = {}

    def times(self, argument: str, constants: Mapping[str, Any]) -> int:
        """The number of times that a launch reads or writes all of an argument."""
        if not constants.get(self.only_with.get(argument, ""), True):
            return 0
        is_read_too = argument in self.accumulates and not constants.get("OVERWRITE", False)
        return 2 if is_read_too or argument in self.updates else 1


KERNELS = {
    "affine_activation_pool_forward": Access(writes=("output",)),
    "affine_activation_pool_backward": Access(writes=("partial_sums",), accumulates=("grad_accum",)),
    "batch_norm_grad_input": Access(writes=("output",)),
    "conv1x1_forward": Access(writes=("output", "stats"), only_with={"stats": "WITH_STATISTICS"}),
    "conv1x1_backward": Access(
        writes=("partial_grad_weight", "partial_sums"),
        accumulates=("grad_accum",),
        only_with={"output": "HAS_SUMS", "out_sums": "HAS_SUMS"},
    ),
    "conv3x3_forward": Access(writes=("output", "stats"), only_with={"stats": "HAS_STATISTICS"}),
    "conv3x3_grad_input": Access(writes=("partial_sums",), accumulates=("grad_accum",)),
    "conv3x3_grad_weight": Access(writes=("partial_grad_weight",)),
    "finish_backward": Access(
        writes=("grad_norm_bias", "grad_norm_weight", "grad_activation_weight", "grad_weight"),
        updates=("sums",),
        only_with={"grad_weight": "HAS_GRAD_WEIGHT", "partial_grad_weight": "HAS_GRAD_WEIGHT", "sums": "HAS_SUMS"},
    ),
    "tile_statistics": Access(writes=("stats",)),
    "combine_statistics": Access(writes=("result",)),
    "image_statistics": Access(writes=("stats",)),
    "norm_activation_max_pool_forward": Access(writes=("output",)),
    "norm_activation_max_pool_backward_reduce": Access(writes=("indices", "partial_sums")),
    "norm_activation_max_pool_backward": Access(writes=("grad_values",)),
}


def launch_bytes(name: str, arguments: Mapping[str, Any]) -> int:
    """The bytes that a launch moves; `arguments`, by name, are compile-time constants too."""
    if name not in KERNELS:
        raise ValueError(
            f"the Triton kernel {name!r} is not in KERNELS: add to benchmarks/gpu_kernels.py what it writes"
        )
    tensors = [(argument, value) for argument, value in arguments.items() if isinstance(value, Tensor)]
    return sum(
        tensor.numel() * tensor.element_size() * KERNELS[name].times(argument, arguments)
        for argument, tensor in tensors
    )
