"""The shared engine's operations on a processor: what `portable` does, in fewer passes, by programs made by Numba.

What each does, and what a row and a channel are, stands there. Each is one task for PyTorch's own team of threads, of
which every one takes some of the rows through all of it. What is rare, or as wide as a picture, is left to PyTorch.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import portable, scratch
from ..interface import AffineInput, BatchNormBackward, Conv1x1, ConvGradients, GradAccumulator
from ..portable import halved
from . import loops
from . import openmp as native

affine_forward = portable.affine_forward

TILE = 192
"""Rows: enough of them for a good matrix product, few enough for the caches."""

TILE_BYTES = 1 << 21
"""What a thread may hold of a tile, unless a quarter of its rows hold more."""

WEIGHT_BYTES = 3 << 19
"""What a convolution's weight may hold. A larger one leaves the nearest caches between tiles, of which portable makes
fewer."""


Told = dict[str, Tensor | int]
"""What a job tells a program, by the names in `loops.FIELDS`."""


def batch_statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    measuring = _measuring(values, values.shape[1])
    values = values if values.stride(1) == 1 else values.contiguous()
    _run(loops.squeeze, values, width=values.shape[1], out=values, **measuring)
    return measuring["found"].unbind()


def batch_norm_grad_input(grad: BatchNormBackward) -> Tensor:
    values = grad.input.values
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    _run(loops.settle, values, **_settling(grad), out=out)
    return out


def affine_backward(grad: Tensor, read: AffineInput, into: GradAccumulator) -> tuple[Tensor, Tensor]:
    if not grad.dtype == read.values.dtype == read.scale.dtype:
        return portable.affine_backward(grad, read, into)
    channels = grad.shape[1]
    always = {"scale": torch.zeros_like(read.scale), "shift": torch.ones_like(read.scale)}  # no ReLU is ever shut
    told = {**_reading(read), **always, **_pending(into), **_summing(read)}
    _run(loops.gradients, read.values, _apart(read), **told, grad=grad, width=channels, weight_parts_line=channels)
    return told["found"].unbind()


def conv1x1_forward(squeeze: Conv1x1) -> None:
    if not _suits(squeeze.input, squeeze.weight):
        return portable.conv1x1_forward(squeeze)
    return _squeeze(squeeze, {})


def conv1x1_forward_with_statistics(squeeze: Conv1x1) -> tuple[Tensor, Tensor]:
    if not _suits(squeeze.input, squeeze.weight):
        return portable.conv1x1_forward_with_statistics(squeeze)
    measuring = _measuring(squeeze.output, squeeze.weight.shape[0])
    _squeeze(squeeze, measuring)
    return measuring["found"].unbind()


def _squeeze(squeeze: Conv1x1, measuring: Told) -> None:
    read, weight, out = squeeze
    _run(loops.squeeze, read.values, _apart(read), **_reading(read), **_weight(weight), out=out, **measuring)


def conv1x1_backward(
    grad: BatchNormBackward, read: AffineInput, weight: Tensor, into: GradAccumulator, ahead: Conv1x1 | None = None
) -> ConvGradients:
    if not _suits(read, weight):
        return portable.conv1x1_backward(grad, read, weight, into, ahead)
    return _gradients(read, weight, into, **_settling(grad), **_ahead(ahead))


def conv3x3_forward(read: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1) -> Tensor:
    if not _suits(read, weight):
        return portable.conv3x3_forward(read, weight, shape, dilation)
    return _convolve(read, weight, shape, dilation, {})


def conv3x3_forward_with_statistics(
    read: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    if not _suits(read, weight):
        return portable.conv3x3_forward_with_statistics(read, weight, shape, dilation)
    measuring = _measuring(read.values, weight.shape[0])
    return _convolve(read, weight, shape, dilation, measuring), *measuring["found"].unbind()


def _convolve(read: AffineInput, weight: Tensor, shape: torch.Size, dilation: int, measuring: Told) -> Tensor:
    out = read.values.new_empty(read.values.shape[0], weight.shape[0])
    told = {**_reading(read), **_weight(weight), **_around(shape, dilation), **measuring}
    told["beyond"] = dilation * (1 + sum(shape[1:][-i:].numel() for i in range(1, len(shape) - 1)))
    _run(loops.convolve, read.values, _apart(read) + told["wide"], **told, out=out)
    return out


def conv3x3_backward(
    grad: Tensor, read: AffineInput, weight: Tensor, into: GradAccumulator, shape: torch.Size, dilation: int = 1
) -> ConvGradients:
    if not _suits(read, weight):
        return portable.conv3x3_backward(grad, read, weight, into, shape, dilation)
    return _gradients(read, weight, into, **_around(shape, dilation), grad=grad)


def pooled_conv1x1_forward(read: AffineInput, weight: Tensor, shape: torch.Size) -> Tensor:
    if not _suits(read, weight):
        return portable.pooled_conv1x1_forward(read, weight, shape)
    out = read.values.new_empty(halved(shape).numel(), weight.shape[0])
    _run(loops.squeeze, read.values, _apart(read), **_reading(read), **_weight(weight), **_pooling(out, shape), out=out)
    return out


def pooled_conv1x1_backward(
    grad: Tensor, read: AffineInput, weight: Tensor, into: GradAccumulator, shape: torch.Size
) -> ConvGradients:
    if not _suits(read, weight):
        return portable.pooled_conv1x1_backward(grad, read, weight, into, shape)
    if into.overwrite and any(side % 2 for side in shape[1:]):
        into.grad_accum.zero_()  # there are pixels that were not pooled
    told = _pooling(grad, shape)
    return _gradients(read, weight / told["pools"], into, **told, grad=grad)


def _gradients(read: AffineInput, weight: Tensor, into: GradAccumulator, **told: Tensor | int) -> ConvGradients:
    told |= {**_reading(read), **_pending(into), **_summing(read), **_weight(weight, back=True)}
    channels, of_weight = weight.shape[1], None
    told["weight_parts_line"] = line = _whole(weight.numel() // channels, weight.dtype)
    if into.needs_grad_weight:
        told["weight_parts"] = weight.new_empty(_threads(read.values), channels, line)
        told["of_weight"] = of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    per_row = sum(loops.apart(count, weight.itemsize) for count in (line, told["wide"]))
    _run(loops.gradients, read.values, per_row, **told)
    return of_weight, *told["found"].unbind()


def _weight(weight: Tensor, back: bool = False) -> Told:
    """And room for it as products read it, from what is read to what is made or `back`."""
    width, channels, *sides = weight.shape
    kernel = math.prod(sides)
    rows, columns = (kernel * width, channels) if back else (channels, kernel * width)
    wide = _whole(columns, weight.dtype)
    panels = weight.new_empty(rows, wide)
    return {"weight": weight, "width": width, "kernel": kernel, "wide": wide, "panels": panels}


def _whole(columns: int, dtype: torch.dtype) -> int:
    """As many panels as hold so many columns, in columns."""
    width = loops.PANEL_BYTES // dtype.itemsize
    return -(-columns // width) * width


def _suits(read: AffineInput, weight: Tensor) -> bool:
    """Whether all is in one precision, one that there are programs for, and the weight not too large. The gradient of
    a single channel is a product with a vector, for which PyTorch has a routine that adds up more exactly."""
    one_precision = weight.dtype == read.values.dtype == read.scale.dtype
    return one_precision and weight.nbytes <= WEIGHT_BYTES and weight.shape[1] > 1


def _reading(read: AffineInput) -> Told:
    return {"channels": read.values.shape[1], "scale": read.scale, "shift": read.shift}


def _pending(into: GradAccumulator) -> Told:
    return {"share": into.grad_scale, "pending": into.grad_accum, "first": into.overwrite}


def _settling(grad: BatchNormBackward) -> Told:
    (values, slope, constant), into = grad
    made = {"made": values, "slope": slope, "constant": constant}
    return {"width": values.shape[1], **made, "made_share": into.grad_scale, "made_pending": into.grad_accum}


def _ahead(squeeze: Conv1x1 | None) -> Told:
    if squeeze is None:
        return {}
    (values, scale, shift), weight, out = squeeze
    told = {"channels": values.shape[1], "values": values, "scale": scale, "shift": shift}
    told |= {"weight": weight, "panels": _weight(weight)["panels"], "out": out}
    return {f"ahead_{name}": value for name, value in told.items()}


def _around(shape: torch.Size, dilation: int) -> Told:
    return {"reach": dilation, **_sides(shape)}


def _sides(shape: torch.Size) -> Told:
    """A picture's, of which there may be fewer than three."""
    depth, height, breadth = (1,) * (4 - len(shape)) + tuple(shape[1:])
    return {"deep": len(shape) > 3, "tall": len(shape) > 2, "depth": depth, "height": height, "breadth": breadth}


def _pooling(pooled_conv1x1_forward: Tensor, shape: torch.Size) -> Told:
    return {"pools": 2 ** len(shape[1:]), "rows": len(pooled_conv1x1_forward), **_sides(shape)}


def _apart(read: AffineInput) -> int:
    """What scratch a row takes of what is read."""
    return loops.apart(read.values.shape[1], read.values.itemsize)


def _threads(values: Tensor) -> int:
    """PyTorch's, or fewer, where there are not as many tiles."""
    return max(1, min(torch.get_num_threads(), -(-values.shape[0] // TILE)))


def _measuring(values: Tensor, width: int) -> Told:
    """Room for what each thread sees, and for the mean and variance of all."""
    parts = values.new_empty(_threads(values), loops.PART_ROWS, width, dtype=torch.float64)
    return {"parts": parts, "found": values.new_empty(2, width)}


def _summing(read: AffineInput) -> Told:
    """Room for the two sums of each thread, and for those of all."""
    channels = read.values.shape[1]
    parts = read.values.new_empty(_threads(read.values), 2, channels, dtype=torch.float64)
    return {"parts": parts, "found": read.scale.new_empty(2, channels)}


def _run(program: Callable[[Any], None], values: Tensor, per_row: int = 0, **told: Tensor | int) -> None:
    """Have every thread do its part of a job on the rows of `values`, with scratch for so many numbers a row."""
    beyond = told.get("beyond", 0)  # rows that the neighbour makes too: not many of all
    threads = min(_threads(values), max(1, values.shape[0] // (4 * beyond or 1)))
    tile = _tile(values, per_row, threads) // told.get("pools", 1)
    tile = max(1, -(-tile // loops.ROWS)) * loops.ROWS
    room = tile * per_row + 2 * beyond * told.get("wide", 0)
    told = {"values": values, "rows": values.shape[0], **told, **native.functions()}
    told |= {"tile": tile, "size": values.itemsize, "room": room}
    whole = threads * room + loops.ROWS  # products read up to so many numbers beyond
    told["scratch"] = scratch.room("tile", whole, values.dtype, values.device)
    job, _held = _job(told)
    native.run(loops.made(program, values.dtype).address, threads, job)


def _job(told: Told) -> tuple[bytes, list[Tensor]]:
    """As a program reads it, and the tensors in which it will find what it is to read."""
    job, tensors = dict.fromkeys(loops.FIELDS, 0), []
    for name, value in told.items():
        if isinstance(value, Tensor):
            tensors.append(tensor := _laid_out(name, value))
            value = tensor.data_ptr()
            if name in loops.LINES:
                job[loops.LINES[name]] = tensor.stride(-2)
        job[name] = value
    assert len(job) == len(loops.FIELDS), f"no program knows of {', '.join(job.keys() - set(loops.FIELDS))}"
    return loops.JOB.pack(*job.values()), tensors


def _tile(values: Tensor, per_row: int, threads: int) -> int:
    """So many rows; where there are few, scratch is small too."""
    in_bytes = max(TILE // 4, TILE_BYTES // (per_row * values.itemsize or 1))
    return min(TILE, in_bytes, values.shape[0] // (4 * threads) + 8)


def _laid_out(name: str, tensor: Tensor) -> Tensor:
    """As a program takes it for granted; what it writes into must have been made so."""
    whole_rows = name in loops.LINES and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
    found = tensor if whole_rows else tensor.contiguous()
    assert found is tensor or name not in loops.WRITTEN, f"{name} cannot be written into"
    return found
