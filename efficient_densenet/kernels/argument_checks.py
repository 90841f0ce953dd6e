"""The shapes, dtypes and strides of an operation's arguments, compared with one another before a kernel is launched.

A kernel of Numba or Triton reads and writes memory by sizes alone: with those of other tensors it would damage memory
that is not theirs. So each operation of each set is `checked`. A replay repeats launches for tensors of the recorded
layouts, and compares nothing again.
"""

import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .._tensors import accumulation_dtype, memory_format_of
from . import interface
from .max_pooling import MaxPool

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_TABLE = """
BatchNormAffine[T channels]: weight[? channels] bias[? channels] inv_std[T+ channels] mean[T+ channels]
AffineInput[T rows channels *sides]: values[T rows channels *sides] norm[T channels]
GradAccumulator[T rows channels]: grad_accum[T rows channels]! sums[T+ 2 channels]!
Gradients[channels]: norm_weight[? channels] norm_bias[? channels]
StatisticsOutput[T channels]: matrix[T+ 3 channels]!
BatchNormBackward[T rows channels]: values[T rows channels] grad_accum[T rows channels]?
    inv_std[T+ channels] mean[T+ channels] sums[T+ 2 channels]!
Conv1x1[T rows channels W out]: input[T rows channels] weight[W out channels] output[W rows out]!!
ImageConv[T rows channels W out]: input[T rows channels] weight[W out channels *taps]

batch_statistics: values[T rows channels] statistics[T channels]
center: output[T rows channels]! mean[T+ channels] values[? rows channels]
batch_norm_grad_input: grad[T rows channels] previous[T rows channels]!
affine_forward: input[T rows channels]
affine_backward: input[T rows channels] grad_output[? rows channels] accumulator[T rows channels]
conv1x1_forward: conv[T rows channels W out] statistics[W out]
conv1x1_backward: input[T rows channels] weight[W out channels] grad_output[W rows out] accumulator[T rows channels]
    next_bottleneck[T rows next_channels W next_out]
conv3x3_forward: conv[T rows channels W out] statistics[W out]
conv3x3_backward: conv[T rows channels W out] grad_output[W rows out] accumulator[T rows channels]
pooled_conv1x1_forward: conv[T rows channels W out]
pooled_conv1x1_backward: conv[T rows channels W out] grad_output[W pooled_rows out] accumulator[T rows channels]
image_statistics: values[T images channels *sides] statistics[T channels]
norm_activation_max_pool: input[T images channels *sides]
norm_activation_max_pool_reduce: input[T images channels *sides] grad_output[? images channels *pooled_sides]
norm_activation_max_pool_backward: input[T images channels *sides] grad_output[? images channels *pooled_sides]
    indices[? images channels *pooled_sides] sums[channels]
"""
"""The dtype and the shape of each tensor, by names: the first tensor that has a name decides, the others must agree.

`T+` is the accumulation dtype of T, `?` is any. A size `next_x` is at most x; a name with a star is several sizes. For
an argument that consists of several tensors stand the names that its class uses, in their order. A kernel writes into
what is marked with `!`, whose rows are contiguous and do not overlap; with `!!`, which is contiguous; and with `?` if
it `may_overwrite`. Images are contiguous in a memory format that all of them have.
"""

_ROWS = {
    name: (names.split(), re.findall(r"(\w+)\[(.*?)\](!*|\?)", tensors))
    for name, names, tensors in re.findall(r"^(\w+)(?:\[(.*?)\])?: (.*(?:\n    .*)*)", _TABLE, re.MULTILINE)
}
"""For each class and each operation the names that it uses, and its rows' tensors."""


def checked(operation: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The operation of a set of kernels, which raises ValueError where its arguments do not fit one another."""
    name, parameters = operation.__name__, [*inspect.signature(operation).parameters]
    hints = typing.get_type_hints(getattr(interface.Kernels, name))
    tensors = [each for path, *row in _ROWS[name][1] for each in _described(path, hints[path], *row)]
    taps = [3, 3, 3] if "conv3x3" in name else []

    @functools.wraps(operation)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        _check(tensors, dict(zip(parameters, args, strict=False)) | kwargs, taps)
        return operation(*args, **kwargs)

    return run


class _Described(NamedTuple):
    """A tensor in the arguments: its path, the parameter where it begins, and what is needed."""

    name: str
    parameter: str
    find: Callable[[Any], Tensor | None]
    dtype: str
    shape: list[str]
    mark: str


def _described(path: str, hint: Any, names: str, mark: str) -> Iterator[_Described]:
    """The tensors in an argument, or in a field of it."""
    kind = next(iter(typing.get_args(hint)), hint)  # of an optional one
    if kind is not Tensor:
        own, tensors = _ROWS[kind.__name__]
        given = dict(zip(own, names.split(), strict=False))
        given |= {f"{each}+": f"{other}+" for each, other in given.items()}
        for field, row, mark in tensors:
            words = (given.get(each, "" if each in own else each) for each in row.split())
            yield from _described(f"{path}.{field}", typing.get_type_hints(kind)[field], " ".join(words), mark)
        return
    (parameter, _, field), (dtype, *shape) = path.partition("."), names.split()
    find = attrgetter(field) if field else lambda tensor: tensor
    yield _Described(path, parameter, find, dtype, shape, mark)


def _check(tensors: list[_Described], arguments: dict[str, Any], taps: list[int]) -> None:
    sizes, dtypes, memory_format = dict[str, Any]({"2": 2, "3": 3}), dict[str, torch.dtype](), torch.contiguous_format
    if isinstance(conv := arguments.get("conv"), interface.ImageConv):
        shape, dims = conv.shape, len(conv.shape) - 1
        if not 1 <= dims <= 3 or conv.dilation < 1:
            found = f"of shape {tuple(shape)} and dilation {conv.dilation}"
            raise _error("images", found, "1 to 3 spatial dimensions, and dilation ≥ 1")
        sizes |= {"rows": shape.numel(), "*taps": taps[:dims]}
        sizes["pooled_rows"] = math.prod((shape[0], *(side // 2 for side in shape[1:])))
    for each in tensors:
        name, parameter, find, dtype, shape, mark = each
        argument = arguments.get(parameter)
        if argument is None or (tensor := find(argument)) is None:
            continue
        if tuple(map(sizes.get, shape)) != tensor.shape or dtypes.get(dtype) is not tensor.dtype:
            _decide(each, tensor, arguments.get("pool"), sizes, dtypes)
        if mark == "!!" or shape[-1].endswith("sides"):
            memory_format = memory_format_of(tensor) if shape[-1] == "*sides" else memory_format
            if not tensor.is_contiguous(memory_format=memory_format):
                raise _error(name, f"with strides {tensor.stride()}", "contiguous memory, in the images' memory format")
        elif mark == "!" or (mark and arguments.get("may_overwrite")):
            (rows, channels), (row_stride, channel_stride) = tensor.shape, tensor.stride()
            if (channel_stride != 1 and channels > 1) or (row_stride < channels and rows > 1):
                raise _error(name, f"with strides {tensor.stride()}", "rows that are contiguous and do not overlap")


def _decide(
    each: _Described, tensor: Tensor, pool: MaxPool | None, sizes: dict[str, Any], dtypes: dict[str, torch.dtype]
) -> None:
    """Decide what the names are that no tensor had before, and refuse a tensor that does not agree with the others."""
    found, needed = tuple(tensor.shape), list[int]()
    if each.shape[-1] == "*sides":
        if not 1 <= len(found) - 2 <= 3 or (pool is not None and len(pool.kernel_size) != len(found) - 2):
            raise _error(each.name, f"of shape {found}", "images of 1 to 3 dimensions, which the pooling has too")
        sizes |= {"*sides": found[2:], "*pooled_sides": [] if pool is None else pool.pooled_size(found[2:])}
    for i, name in enumerate(each.shape):
        size = found[i] if i < len(found) else -1
        if name.startswith("next_"):
            size = min(size, sizes[name.removeprefix("next_")])
        needed += sizes[name] if name.startswith("*") else [sizes.setdefault(name, size)]
    if each.dtype not in dtypes:
        dtypes |= {each.dtype: tensor.dtype, f"{each.dtype}+": accumulation_dtype(tensor.dtype)}
    dtype = tensor.dtype if each.dtype == "?" else dtypes[each.dtype]
    if [*found] != needed or tensor.dtype is not dtype:
        raise _error(each.name, f"of shape {found} in {tensor.dtype}", f"{tuple(needed)} in {dtype}")


def _error(name: str, found: str, needed: str) -> ValueError:
    return ValueError(f"a kernel was given {name} {found}, but needs {needed}: a layer's tensors must fit one another")
