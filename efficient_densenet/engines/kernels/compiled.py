"""The shared engine's operations on a processor: what `portable` does, in fewer passes, by programs made by Numba.

What each does, and what a row and a channel are, stands there. Each is one task for PyTorch's own team of threads, of
which every one takes some of the rows through all of it. What is rare, or as wide as a picture, is left to PyTorch.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import loops, native, portable, scratch
from .portable import Gradients, Into, Read, Settling, Squeeze, halved

affine = portable.affine

TILE = 192
"""Rows: enough of them for a good matrix product, few enough for the caches."""

TILE_BYTES = 1 << 21
"""What a thread may hold of a tile, unless a quarter of its rows hold more."""

WEIGHT_BYTES = 3 << 19
"""What a convolution's weight may hold. A larger one leaves the nearest caches between tiles, of which portable makes
fewer."""


Told = dict[str, Tensor | int]
"""What a job tells a program, by the names in `loops.FIELDS`."""


def statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    parts = _parts(values, values.shape[1])
    _run(loops.measure, values, width=values.shape[1], parts=parts)
    return _combined(parts, values.dtype)


def settled(grad: Settling) -> Tensor:
    values = grad.read.values
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    _run(loops.settle, values, **_settling(grad), out=out)
    return out


def affine_gradients(grad: Tensor, read: Read, into: Into) -> tuple[Tensor, Tensor]:
    if not grad.dtype == read.values.dtype == read.scale.dtype:
        return portable.affine_gradients(grad, read, into)
    channels = grad.shape[1]
    sums = _sums(read.values)
    always = {"scale": torch.zeros_like(read.scale), "shift": torch.ones_like(read.scale)}  # no ReLU is ever shut
    told = {**_reading(read), **always, **_pending(into), "sums": sums}
    _run(loops.gradients, read.values, _apart(read), **told, grad=grad, width=channels, of_weight_line=channels)
    return tuple(sums.sum(0).to(read.scale.dtype))


def squeezed(squeeze: Squeeze) -> None:
    if not _suits(squeeze.read, squeeze.weight):
        return portable.squeezed(squeeze)
    return _squeeze(squeeze)


def squeezed_and_measured(squeeze: Squeeze) -> tuple[Tensor, Tensor]:
    if not _suits(squeeze.read, squeeze.weight):
        return portable.squeezed_and_measured(squeeze)
    parts = _parts(squeeze.read.values, squeeze.weight.shape[0])
    _squeeze(squeeze, parts=parts)
    return _combined(parts, squeeze.out.dtype)


def _squeeze(squeeze: Squeeze, **measuring: Tensor) -> None:
    read, weight, out = squeeze
    told = {**_reading(read), "weight": _panels(weight.t()), "width": weight.shape[0], "out": out, **measuring}
    _run(loops.squeeze, read.values, _apart(read), **told)


def squeezed_gradients(
    grad: Settling, read: Read, weight: Tensor, into: Into, ahead: Squeeze | None = None
) -> Gradients:
    if not _suits(read, weight):
        return portable.squeezed_gradients(grad, read, weight, into, ahead)
    of_weight, *sums = _gradients(read, weight, into, **_settling(grad), **_ahead(ahead))
    return None if of_weight is None else of_weight.t(), *sums


def convolved(read: Read, weight: Tensor, shape: torch.Size, dilation: int = 1) -> Tensor:
    if not _suits(read, weight):
        return portable.convolved(read, weight, shape, dilation)
    out = read.values.new_empty(read.values.shape[0], weight.shape[0])
    told = {**_reading(read), **_around(weight, shape, dilation)}
    told["beyond"] = dilation * (1 + sum(shape[1:][-i:].numel() for i in range(1, len(shape) - 1)))
    told |= _weight(weight.flatten(2).permute(1, 2, 0).flatten(1))
    _run(loops.convolve, read.values, _apart(read) + told["wide"], **told, out=out)
    return out


def convolved_gradients(
    grad: Tensor, read: Read, weight: Tensor, into: Into, shape: torch.Size, dilation: int = 1
) -> Gradients:
    if not _suits(read, weight):
        return portable.convolved_gradients(grad, read, weight, into, shape, dilation)
    turned = weight.flatten(2).flip(2).permute(2, 0, 1).flatten(0, 1)  # gradients come from where it gave to
    of_weight, *sums = _gradients(read, turned, into, **_around(weight, shape, dilation), grad=grad)
    if of_weight is None:
        return None, *sums
    of_weight = of_weight.unflatten(1, (-1, weight.shape[0]))
    middle = of_weight[:, of_weight.shape[1] // 2, None]
    of_weight = of_weight + middle * 0  # what is not finite meets the padding's zeros
    return of_weight.flip(1).permute(2, 0, 1).reshape(weight.shape), *sums


def pooled(read: Read, weight: Tensor, shape: torch.Size) -> Tensor:
    if not _suits(read, weight):
        return portable.pooled(read, weight, shape)
    out = read.values.new_empty(halved(shape).numel(), weight.shape[0])
    told = {**_reading(read), **_pooling(out, shape), "weight": _panels(weight.t()), "out": out}
    _run(loops.squeeze, read.values, _apart(read), **told)
    return out


def pooled_gradients(grad: Tensor, read: Read, weight: Tensor, into: Into, shape: torch.Size) -> Gradients:
    if not _suits(read, weight):
        return portable.pooled_gradients(grad, read, weight, into, shape)
    if into.first and any(side % 2 for side in shape[1:]):
        into.pending.zero_()  # there are pixels that were not pooled
    told = _pooling(grad, shape)
    of_weight, *sums = _gradients(read, weight / told["pools"], into, **told, grad=grad)
    return None if of_weight is None else of_weight.t(), *sums


def _gradients(read: Read, weight: Tensor, into: Into, **told: Tensor | int) -> Gradients:
    """Of a product: that of its weight lies transposed, tall rather than wide, which processors make faster."""
    (width, channels), sums = weight.shape, _sums(read.values)
    whole = _whole(width, weight.dtype)
    told |= {**_reading(read), **_pending(into), **_weight(weight), "sums": sums, "of_weight_line": whole}
    if into.learns:
        told["of_weight"] = _each(read.values, channels, whole)
    per_row = sum(loops.apart(count, weight.itemsize) for count in (whole, channels, told["wide"]))
    _run(loops.gradients, read.values, per_row, **told)
    of_weight = told["of_weight"].sum(0)[:, :width] if into.learns else None
    return of_weight, *sums.sum(0).to(read.scale.dtype)


def _weight(matrix: Tensor) -> Told:
    return {"weight": _panels(matrix), "wide": _whole(matrix.shape[1], matrix.dtype)}


def _panels(matrix: Tensor) -> Tensor:
    """A matrix as products read it best: panels of so many columns after one another, the last filled with zeros."""
    columns, width = matrix.shape[1], loops.PANEL_BYTES // matrix.itemsize
    whole = F.pad(matrix, (0, _whole(columns, matrix.dtype) - columns))
    return whole.unflatten(1, (-1, width)).transpose(0, 1).contiguous()


def _whole(columns: int, dtype: torch.dtype) -> int:
    """As many panels as hold so many columns, in columns."""
    width = loops.PANEL_BYTES // dtype.itemsize
    return -(-columns // width) * width


def _suits(read: Read, weight: Tensor) -> bool:
    """Whether all is in one precision, one that there are programs for, and the weight not too large."""
    return weight.dtype == read.values.dtype == read.scale.dtype and weight.nbytes <= WEIGHT_BYTES


def _reading(read: Read) -> Told:
    return {"channels": read.values.shape[1], "scale": read.scale, "shift": read.shift}


def _pending(into: Into) -> Told:
    return {"share": into.share, "pending": into.pending, "first": into.first}


def _settling(grad: Settling) -> Told:
    (values, slope, constant), into = grad
    made = {"made": values, "slope": slope, "constant": constant}
    return {"width": values.shape[1], **made, "made_share": into.share, "made_pending": into.pending}


def _ahead(squeeze: Squeeze | None) -> Told:
    if squeeze is None:
        return {}
    (values, scale, shift), weight, out = squeeze
    read = {"channels": values.shape[1], "values": values, "scale": scale, "shift": shift}
    return {f"ahead_{name}": value for name, value in {**read, "weight": _panels(weight.t()), "out": out}.items()}


def _around(weight: Tensor, shape: torch.Size, dilation: int) -> Told:
    return {
        "width": weight.shape[0],
        "seen": weight.shape[0] * weight.shape[2:].numel(),
        "reach": dilation,
        **_sides(shape),
    }


def _sides(shape: torch.Size) -> Told:
    """A picture's, of which there may be fewer than three."""
    depth, height, breadth = (1,) * (4 - len(shape)) + tuple(shape[1:])
    return {"deep": len(shape) > 3, "tall": len(shape) > 2, "depth": depth, "height": height, "breadth": breadth}


def _pooling(pooled: Tensor, shape: torch.Size) -> Told:
    return {"pools": 2 ** len(shape[1:]), "rows": len(pooled), "width": pooled.shape[1], **_sides(shape)}


def _apart(read: Read) -> int:
    """What scratch a row takes of what is read."""
    return loops.apart(read.values.shape[1], read.values.itemsize)


def _threads(values: Tensor) -> int:
    """PyTorch's, or fewer, where there are not as many tiles."""
    return max(1, min(torch.get_num_threads(), -(-values.shape[0] // TILE)))


def _each(values: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros for every thread to add to."""
    return values.new_zeros(_threads(values), *shape, dtype=dtype)


def _sums(values: Tensor) -> Tensor:
    return _each(values, 2, values.shape[1], dtype=torch.float64)


def _parts(values: Tensor, width: int) -> Tensor:
    return _each(values, loops.PART_ROWS, width, dtype=torch.float64)


def _combined(parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and variance of all rows from what each thread found."""
    count, means, squares = parts.numpy()[:, :3].swapaxes(0, 1)
    found, rows = parts.new_empty(2, parts.shape[2], dtype=dtype), count.sum(0)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite stays so without a word, as in PyTorch
        mean = (means * count).sum(0) / rows
        found.numpy()[:] = mean, (squares + (means - mean) ** 2 * count).sum(0) / rows
    return found.unbind()


def _run(program: Callable[[np.record], None], values: Tensor, per_row: int = 0, **told: Tensor | int) -> None:
    """Have every thread do its part of a job on the rows of `values`, with scratch for so many numbers a row."""
    beyond = told.get("beyond", 0)  # rows that the neighbour makes too: not many of all
    threads = min(_threads(values), max(1, values.shape[0] // (4 * beyond or 1)))
    tile = _tile(values, per_row, threads) // told.get("pools", 1)
    tile = max(1, -(-tile // loops.ROWS)) * loops.ROWS
    room = tile * per_row + 2 * beyond * told.get("wide", 0)
    told = {"values": values, "rows": values.shape[0], **told, **native.functions()}
    told |= {"tile": tile, "size": values.itemsize, "room": room}
    told["scratch"] = scratch.room("tile", threads * room, values.dtype, values.device)
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
