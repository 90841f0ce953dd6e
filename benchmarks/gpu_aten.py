"""What an operation of ATen asks of a GPU: its launches and its bytes, by rules that `tests/test_gpu_model.py` checks.

- A view or an allocation costs no launch and no bytes, only time of the host.
- Other operations are one launch. They read every input once and write every output once; of an expanded tensor they
  touch what is in memory. An operation in place reads and writes its tensor, unless it only fills it.
- A batch norm in training mode reads its input twice: for the statistics, then to normalize. Its backward reads the
  input and grad_output twice.
- A convolution's backward is one launch for each gradient; both read grad_output.
- A concatenation is one launch for each 128 tensors.
- A foreach operation is one launch for each chunk of its tensors: at most 110 tensors with one list, 64 with two, 48
  with three, 36 with four, 30 with five, and at most 320 blocks of 65,536 numbers.
- What an operation does within, such as cuDNN's workspaces and conversions of layout, is not seen.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from gpu_kernels import Traffic
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

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        self.func, self.args, self.kwargs, self.output = func, args, kwargs, output
        self.schema, self.name = func._schema, func.overloadpacket.__name__
        named = {argument.name: argument for argument in self.schema.arguments}
        by_position = list(zip(self.schema.arguments, args, strict=False))
        self.arguments = [*by_position, *((named[name], value) for name, value in kwargs.items())]

    @property
    def is_host_only(self) -> bool:
        """Whether it is an allocation, or a view: its results are an input's memory, unchanged."""
        aliases = [each.alias_info for each in self.schema.returns]
        is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        return is_view or self.name in ALLOCATIONS or self.name in VIEWS

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

    def traffic(self) -> Iterator[Traffic]:
        """A row for each tensor and direction."""
        if self.name == "convolution_backward":
            yield from self._conv_backward_traffic()
            return
        for argument, value in self.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            read = not argument.is_out and not (written and self.name in FILLS)
            times = read * (2 if self._trains and argument.name in READ_TWICE else 1) + written
            for tensor in tensors_of(value):
                yield from [Traffic(touched_bytes(tensor))] * times
        returns = self.schema.returns
        for returned, value in zip(returns, self.output if len(returns) > 1 else [self.output], strict=False):
            if returned.alias_info is None:
                yield from (Traffic(touched_bytes(tensor)) for tensor in tensors_of(value))

    @property
    def _trains(self) -> bool:
        """Whether it is a batch norm in training mode."""
        return self.name in BATCH_NORMS and any(
            value for argument, value in self.arguments if argument.name in ("train", "training")
        )

    def _conv_backward_traffic(self) -> Iterator[Traffic]:
        grad_output, x, weight, *_, output_mask = (value for _, value in self.arguments)
        for needed, factor, grad in zip(output_mask, (weight, x, None), self.output, strict=True):
            if needed:
                yield from (Traffic(touched_bytes(each)) for each in (grad_output, factor, grad) if each is not None)

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
