"""The shared engine's operations on a GPU: what `portable` does, in fewer passes, by programs in Triton.

What each does, and what a row and a channel are, stands there. 3×3 convolutions, and the product after pooling, are
cuDNN's. float32 is multiplied exactly or in TF32 as PyTorch's setting for convolutions says, which these products are.
No kernel is a custom operator: they run within an autograd.Function, which torch.compile does not look into.
Nothing waits for the device, and nothing is added up in an order that changes.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from .. import portable
from ..portable import Gradients, Into, Read, Settling, Squeeze, pictures, rows
from . import kernels as programs

WIDEST = 256
"""A bottleneck of more channels does not fit in what one program can hold: PyTorch's own operations do it."""

PROGRAMS = 2048
"""How many programs share the rows: some for every processor of a large GPU, yet few sums to add up afterwards."""

_TILE = {"BLOCK_ROWS": 64, "BLOCK_CHANNELS": 32}
_NARROW_TILE = {"BLOCK_ROWS": 128, "BLOCK_CHANNELS": 16}


def statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    values = _lines(values)
    num_rows, channels = values.shape
    block_rows, block_channels = _NARROW_TILE.values()
    grid = triton.cdiv(num_rows, block_rows), triton.cdiv(channels, block_channels)
    parts = values.new_empty(grid[0], 2, channels, dtype=torch.float32)
    sizes = channels, values.stride(0)
    _launch(programs.measured, grid, parts, values, num_rows, *sizes, UNIT=_unit(*sizes), **_NARROW_TILE)
    return _combined(parts, block_rows, num_rows)


def affine(read: Read) -> Tensor:
    return _rectified(read, read.values.dtype, torch.Size([len(read.values), 1, 1]), relu=False)


def affine_gradients(grad: Tensor, read: Read, into: Into) -> tuple[Tensor, Tensor]:
    sums = _collected(grad, read, into, torch.Size([len(read.values), 1, 1]), relu=False)
    return sums[0], sums[1]


def squeezed(squeeze: Squeeze) -> None:
    if len(squeeze.weight) > WIDEST:
        portable.squeezed(squeeze)
    else:
        _squeezed(squeeze)


def squeezed_and_measured(squeeze: Squeeze) -> tuple[Tensor, Tensor]:
    if len(squeeze.weight) > WIDEST:
        portable.squeezed(squeeze)
        return statistics(squeeze.out)
    return _combined(*_squeezed(squeeze), num_rows=len(squeeze.out))


def squeezed_gradients(
    grad: Settling, read: Read, weight: Tensor, into: Into, ahead: Squeeze | None = None
) -> Gradients:
    if len(weight) > WIDEST:
        return portable.squeezed_gradients(grad, read, weight, into, ahead)
    found = _squeezed_gradients(settled(grad), read, weight, into)
    if ahead is not None:
        squeezed(ahead)
    return found


def _squeezed_gradients(grad: Tensor, read: Read, weight: Tensor, into: Into) -> Gradients:
    (values, *vectors), (share, pending, first, learns), weight = _prepared(read), into, weight.contiguous()
    num_rows, channels = values.shape
    block_width = _block_width(weight)
    # What a program holds must fit its registers: those of an exact product, or of a wide one, hold half as much.
    heavy = block_width > 128 or (weight.dtype == torch.float32 and _precision() == "ieee")
    blocks = {"BLOCK_ROWS": 32, "BLOCK_CHANNELS": 32 if heavy else 64}
    grid = _grid(num_rows, channels, blocks)
    weight_parts = values.new_empty(grid[1] if learns else 0, *weight.shape, dtype=torch.float32)
    parts = values.new_empty(grid[1], 2, channels, dtype=torch.float32)
    tensors = weight_parts, parts, pending, grad.contiguous(), values, *vectors, share.contiguous(), weight
    sizes = channels, pending.stride(0), values.stride(0)
    constants = {"WIDTH": len(weight), "BLOCK_WIDTH": block_width, "UNIT": _unit(*sizes), "PRECISION": _precision()}
    constants |= {"FIRST": first, "LEARNS": learns}
    warps = {"num_warps": 8, "num_stages": 1 if heavy else 2}
    _launch(programs.squeezed_gradients, grid, *tensors, num_rows, *sizes, **constants, **blocks, **warps)
    sums = parts.sum(0)
    return weight_parts.sum(0) if learns else None, sums[0], sums[1]


def convolved(read: Read, weight: Tensor, shape: torch.Size, dilation: int = 1) -> Tensor:
    return _convolved(read, weight, shape, 1, dilation)


def convolved_and_measured(
    read: Read, weight: Tensor, shape: torch.Size, dilation: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    out = convolved(read, weight, shape, dilation)
    return out, *statistics(out)


def convolved_gradients(
    grad: Tensor, read: Read, weight: Tensor, into: Into, shape: torch.Size, dilation: int = 1
) -> Gradients:
    return _convolved_gradients(grad, read, weight, into, shape, 1, dilation)


def pooled(read: Read, weight: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) != 3:
        return portable.pooled(read, weight, shape)
    return _convolved(read, weight[:, :, None, None], shape, side=2)


def pooled_gradients(grad: Tensor, read: Read, weight: Tensor, into: Into, shape: torch.Size) -> Gradients:
    if len(shape) != 3:
        return portable.pooled_gradients(grad, read, weight, into, shape)
    of_weight, *sums = _convolved_gradients(grad, read, weight[:, :, None, None], into, shape, side=2)
    return None if of_weight is None else of_weight.flatten(1), *sums


def settled(grad: Settling) -> Tensor:
    (values, *vectors), into = _prepared(grad.read), grad.into
    num_rows, channels = values.shape
    found = torch.empty_like(values, memory_format=torch.contiguous_format)
    tensors = found, into.pending, values, *vectors, into.share.contiguous()
    sizes = channels, into.pending.stride(0), values.stride(0)
    grid = _grid(num_rows, channels, _NARROW_TILE)
    _launch(programs.settled, grid, *tensors, num_rows, *sizes, UNIT=_unit(*sizes), **_NARROW_TILE)
    return found


def _squeezed(squeeze: Squeeze) -> tuple[Tensor, int]:
    """The mean and the sum of squares of each tile of the product, and of how many rows a tile is."""
    (values, *vectors), weight, made = _prepared(squeeze.read), squeeze.weight.contiguous(), squeeze.out
    num_rows, channels = values.shape
    block_width = _block_width(weight)
    block_rows = 128 if block_width <= 64 else 64
    parts = values.new_empty(triton.cdiv(num_rows, block_rows), 2, len(weight), dtype=torch.float32)
    sizes = channels, values.stride(0)
    constants = {"WIDTH": len(weight), "BLOCK_WIDTH": block_width, "UNIT": _unit(*sizes), "PRECISION": _precision()}
    blocks = {"BLOCK_ROWS": block_rows, "BLOCK_CHANNELS": 32}
    warps = {"num_warps": 4 if block_width <= 128 else 8, "num_stages": 2}
    tensors = made, parts, values, *vectors, weight
    _launch(programs.squeezed, (len(parts),), *tensors, num_rows, *sizes, **constants, **blocks, **warps)
    return parts, block_rows


def _combined(parts: Tensor, block_rows: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of all rows, from those of tiles."""
    channels = parts.shape[-1]
    found = parts.new_empty(2, channels)
    blocks = {"BLOCK_ROWS": block_rows, "BLOCK_PARTS": 128, "BLOCK_CHANNELS": 16}
    _launch(programs.combined, (triton.cdiv(channels, 16),), found, parts, num_rows, channels, **blocks)
    return found[0], found[1]


def _convolved(read: Read, weight: Tensor, shape: torch.Size, side: int, dilation: int = 1) -> Tensor:
    """cuDNN's convolution of the activation, or of its means over side × side pixels."""
    reach = {"padding": weight.shape[-1] // 2 * dilation, "dilation": dilation}
    parts, convolve = _activations(read, weight.dtype, shape, side), portable.CONVOLVE[len(shape) - 1]
    made = [rows(convolve(activation, weight, **reach)) for _, _, activation in parts]
    return made[0] if len(made) == 1 else torch.cat(made)


def _convolved_gradients(
    grad: Tensor, read: Read, weight: Tensor, into: Into, shape: torch.Size, side: int, dilation: int = 1
) -> Gradients:
    of_weight = torch.zeros_like(weight, dtype=torch.float32) if into.learns else None
    sums = into.share.new_zeros(2, len(into.share))
    padding = [size // 2 * dilation for size in weight.shape[2:]]
    ones, zeros, reach = ([size] * len(padding) for size in (1, 0, dilation))
    for tile, made_tile, activation in _activations(read, weight.dtype, shape, side):
        of_made = grad[made_tile].unflatten(0, (len(activation), *activation.shape[2:])).movedim(-1, 1)
        gradient, part, _ = torch.ops.aten.convolution_backward(
            *(of_made, activation, weight, None, ones, padding, reach, False, zeros, 1, [True, into.learns, False])
        )
        if into.learns:
            of_weight += part
        here, part_shape = read._replace(values=read.values[tile]), torch.Size([len(activation), *shape[1:]])
        sums += _collected(rows(gradient), here, into.at(tile), part_shape, side)
    return of_weight, sums[0], sums[1]


def _activations(read: Read, dtype: torch.dtype, shape: torch.Size, side: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Some pictures at a time, as many as scratch may hold: which rows of the values they are, which rows of what is
    made of them, and their activation."""
    number, *sizes = shape
    made_sizes = [size // side for size in sizes]
    whole, made_whole = math.prod(sizes), math.prod(made_sizes)
    each = max(1, portable.TILE_BYTES["cuda"] // max(1, made_whole * len(read.scale) * dtype.itemsize))
    for start in range(0, max(1, number), each):
        stop = min(start + each, number)
        tile = slice(start * whole, stop * whole)
        here, part_shape = read._replace(values=read.values[tile]), torch.Size([stop - start, *sizes])
        activation = pictures(_rectified(here, dtype, part_shape, side), torch.Size([stop - start, *made_sizes]))
        yield tile, slice(start * made_whole, stop * made_whole), activation


def _rectified(read: Read, dtype: torch.dtype, shape: torch.Size, side: int = 1, relu: bool = True) -> Tensor:
    values, *vectors = _prepared(read)
    number, height, width = _planes(shape)
    num_rows, channels = number * (height // side) * (width // side), values.shape[1]
    made = values.new_empty(num_rows, channels, dtype=dtype)
    sizes = channels, values.stride(0)
    constants = {"SIDE": side, "RELU": relu, "UNIT": _unit(*sizes)}
    grid = _grid(num_rows, channels, _TILE)
    _launch(programs.rectified, grid, made, values, *vectors, num_rows, *sizes, height, width, **constants, **_TILE)
    return made


def _collected(grad: Tensor, read: Read, into: Into, shape: torch.Size, side: int = 1, relu: bool = True) -> Tensor:
    """The gradient of what `_rectified` reads: adds it to what is pending, and returns both sums."""
    (values, *vectors), (share, pending, first, _) = _prepared(read), into
    if first and any(size % side for size in shape[1:]):
        pending.zero_()  # at the edge are pixels that are in no window
    num_rows, channels = grad.shape
    grid = _grid(num_rows, channels, _TILE)
    parts = values.new_empty(grid[1], 2, channels, dtype=torch.float32)
    tensors = parts, pending, grad.contiguous(), values, *vectors, share.contiguous()
    sizes = channels, pending.stride(0), values.stride(0)
    constants = {"SIDE": side, "RELU": relu, "FIRST": first, "UNIT": _unit(*sizes)}
    _launch(programs.collected, grid, *tensors, num_rows, *sizes, *_planes(shape)[1:], **constants, **_TILE)
    return parts.sum(0)


def _planes(shape: torch.Size) -> tuple[int, int, int]:
    """Number, height and width; pixels that are not pooled may as well be in one row."""
    return tuple(shape) if len(shape) == 3 else (shape[0], math.prod(shape[1:]), 1)


def _launch(program: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    with torch.cuda.device_of(arguments[0]):  # which need not be the current device
        program[grid](*arguments, **constants)


def _grid(num_rows: int, channels: int, blocks: dict[str, int]) -> tuple[int, int]:
    """Blocks of channels, and among how many programs the tiles of rows are split."""
    columns = triton.cdiv(channels, blocks["BLOCK_CHANNELS"])
    return columns, max(1, min(triton.cdiv(num_rows, blocks["BLOCK_ROWS"]), PROGRAMS // columns))


def _block_width(weight: Tensor) -> int:
    return max(16, triton.next_power_of_2(len(weight)))


def _unit(*sizes: int) -> int:
    return math.gcd(4, *sizes)


def _lines(matrix: Tensor) -> Tensor:
    """With the channels of a row side by side, as the programs need them."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _prepared(read: Read) -> tuple[Tensor, Tensor, Tensor]:
    return _lines(read.values), read.scale.contiguous(), read.shift.contiguous()


def _precision() -> str:
    """How PyTorch's setting has float32 multiplied in a convolution."""
    convolutions = getattr(torch.backends.cudnn, "conv", None)  # since PyTorch 2.9, which refuses mixed settings
    tf32 = torch.backends.cudnn.allow_tf32 if convolutions is None else convolutions.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"
