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
from ..interface import AffineInput, BatchNormBackward, Conv1x1, ConvGradients, GradAccumulator
from ..portable import to_pixel_matrix, to_spatial
from . import kernels as programs

WIDEST = 256
"""A bottleneck of more channels does not fit in what one program can hold: PyTorch's own operations do it."""

PROGRAMS = 2048
"""How many programs share the rows: some for every processor of a large GPU, yet few sums to add up afterwards."""

_TILE = {"BLOCK_ROWS": 64, "BLOCK_CHANNELS": 32}
_NARROW_TILE = {"BLOCK_ROWS": 128, "BLOCK_CHANNELS": 16}


def batch_statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    values = _lines(values)
    num_rows, channels = values.shape
    block_rows, block_channels = _NARROW_TILE.values()
    grid = triton.cdiv(num_rows, block_rows), triton.cdiv(channels, block_channels)
    parts = values.new_empty(grid[0], 2, channels, dtype=torch.float32)
    sizes = channels, values.stride(0)
    _launch(programs.measured, grid, parts, values, num_rows, *sizes, UNIT=_unit(*sizes), **_NARROW_TILE)
    return _combined(parts, block_rows, num_rows)


def affine_forward(read: AffineInput) -> Tensor:
    return _rectified(read, read.values.dtype, torch.Size([len(read.values), 1, 1]), relu=False)


def affine_backward(grad: Tensor, read: AffineInput, into: GradAccumulator) -> tuple[Tensor, Tensor]:
    sums = _collected(grad, read, into, torch.Size([len(read.values), 1, 1]), relu=False)
    return sums[0], sums[1]


def conv1x1_forward(squeeze: Conv1x1) -> None:
    if len(squeeze.weight) > WIDEST:
        portable.conv1x1_forward(squeeze)
    else:
        _squeezed(squeeze)


def conv1x1_forward_with_statistics(squeeze: Conv1x1) -> tuple[Tensor, Tensor]:
    if len(squeeze.weight) > WIDEST:
        portable.conv1x1_forward(squeeze)
        return batch_statistics(squeeze.output)
    return _combined(*_squeezed(squeeze), num_rows=len(squeeze.output))


def conv1x1_backward(
    grad: BatchNormBackward, read: AffineInput, weight: Tensor, into: GradAccumulator, ahead: Conv1x1 | None = None
) -> ConvGradients:
    if len(weight) > WIDEST:
        return portable.conv1x1_backward(grad, read, weight, into, ahead)
    found = _squeezed_gradients(batch_norm_grad_input(grad), read, weight, into)
    if ahead is not None:
        conv1x1_forward(ahead)
    return found


def _squeezed_gradients(grad: Tensor, read: AffineInput, weight: Tensor, into: GradAccumulator) -> ConvGradients:
    (values, *vectors), (grad_scale, grad_accum, first, needs_grad_weight), weight = (
        _prepared(read),
        into,
        weight.contiguous(),
    )
    num_rows, channels = values.shape
    block_width = _block_width(weight)
    # What a program holds must fit its registers: those of an exact product, or of a wide one, hold half as much.
    heavy = block_width > 128 or (weight.dtype == torch.float32 and _precision() == "ieee")
    blocks = {"BLOCK_ROWS": 32, "BLOCK_CHANNELS": 32 if heavy else 64}
    grid = _grid(num_rows, channels, blocks)
    weight_parts = values.new_empty(grid[1] if needs_grad_weight else 0, *weight.shape, dtype=torch.float32)
    parts = values.new_empty(grid[1], 2, channels, dtype=torch.float32)
    tensors = weight_parts, parts, grad_accum, grad.contiguous(), values, *vectors, grad_scale.contiguous(), weight
    sizes = channels, grad_accum.stride(0), values.stride(0)
    constants = {"WIDTH": len(weight), "BLOCK_WIDTH": block_width, "UNIT": _unit(*sizes), "PRECISION": _precision()}
    constants |= {"FIRST": first, "LEARNS": needs_grad_weight}
    warps = {"num_warps": 8, "num_stages": 1 if heavy else 2}
    _launch(programs.conv1x1_backward, grid, *tensors, num_rows, *sizes, **constants, **blocks, **warps)
    sums = parts.sum(0)
    return weight_parts.sum(0) if needs_grad_weight else None, sums[0], sums[1]


def conv3x3_forward(read: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1) -> Tensor:
    return _convolved(read, weight, shape, 1, dilation)


def conv3x3_forward_with_statistics(
    read: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    out = conv3x3_forward(read, weight, shape, dilation)
    return out, *batch_statistics(out)


def conv3x3_backward(
    grad: Tensor, read: AffineInput, weight: Tensor, into: GradAccumulator, shape: torch.Size, dilation: int = 1
) -> ConvGradients:
    return _convolved_gradients(grad, read, weight, into, shape, 1, dilation)


def pooled_conv1x1_forward(read: AffineInput, weight: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) != 3:
        return portable.pooled_conv1x1_forward(read, weight, shape)
    return _convolved(read, weight[:, :, None, None], shape, side=2)


def pooled_conv1x1_backward(
    grad: Tensor, read: AffineInput, weight: Tensor, into: GradAccumulator, shape: torch.Size
) -> ConvGradients:
    if len(shape) != 3:
        return portable.pooled_conv1x1_backward(grad, read, weight, into, shape)
    of_weight, *sums = _convolved_gradients(grad, read, weight[:, :, None, None], into, shape, side=2)
    return None if of_weight is None else of_weight.flatten(1), *sums


def batch_norm_grad_input(grad: BatchNormBackward) -> Tensor:
    (values, *vectors), into = _prepared(grad.input), grad.accumulator
    num_rows, channels = values.shape
    found = torch.empty_like(values, memory_format=torch.contiguous_format)
    tensors = found, into.grad_accum, values, *vectors, into.grad_scale.contiguous()
    sizes = channels, into.grad_accum.stride(0), values.stride(0)
    grid = _grid(num_rows, channels, _NARROW_TILE)
    _launch(programs.batch_norm_grad_input, grid, *tensors, num_rows, *sizes, UNIT=_unit(*sizes), **_NARROW_TILE)
    return found


def _squeezed(squeeze: Conv1x1) -> tuple[Tensor, int]:
    """The mean and the sum of squares of each tile of the product, and of how many rows a tile is."""
    (values, *vectors), weight, made = _prepared(squeeze.input), squeeze.weight.contiguous(), squeeze.output
    num_rows, channels = values.shape
    block_width = _block_width(weight)
    block_rows = 128 if block_width <= 64 else 64
    parts = values.new_empty(triton.cdiv(num_rows, block_rows), 2, len(weight), dtype=torch.float32)
    sizes = channels, values.stride(0)
    constants = {"WIDTH": len(weight), "BLOCK_WIDTH": block_width, "UNIT": _unit(*sizes), "PRECISION": _precision()}
    blocks = {"BLOCK_ROWS": block_rows, "BLOCK_CHANNELS": 32}
    warps = {"num_warps": 4 if block_width <= 128 else 8, "num_stages": 2}
    tensors = made, parts, values, *vectors, weight
    _launch(programs.conv1x1_forward, (len(parts),), *tensors, num_rows, *sizes, **constants, **blocks, **warps)
    return parts, block_rows


def _combined(parts: Tensor, block_rows: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of all rows, from those of tiles."""
    channels = parts.shape[-1]
    found = parts.new_empty(2, channels)
    blocks = {"BLOCK_ROWS": block_rows, "BLOCK_PARTS": 128, "BLOCK_CHANNELS": 16}
    _launch(programs.combined, (triton.cdiv(channels, 16),), found, parts, num_rows, channels, **blocks)
    return found[0], found[1]


def _convolved(read: AffineInput, weight: Tensor, shape: torch.Size, side: int, dilation: int = 1) -> Tensor:
    """cuDNN's convolution of the activation, or of its means over side × side pixels."""
    reach = {"padding": weight.shape[-1] // 2 * dilation, "dilation": dilation}
    parts, convolve = _activations(read, weight.dtype, shape, side), portable.CONV_BY_DIMS[len(shape) - 1]
    made = [to_pixel_matrix(convolve(activation, weight, **reach)) for _, _, activation in parts]
    return made[0] if len(made) == 1 else torch.cat(made)


def _convolved_gradients(
    grad: Tensor,
    read: AffineInput,
    weight: Tensor,
    into: GradAccumulator,
    shape: torch.Size,
    side: int,
    dilation: int = 1,
) -> ConvGradients:
    of_weight = torch.zeros_like(weight, dtype=torch.float32) if into.needs_grad_weight else None
    sums = into.grad_scale.new_zeros(2, len(into.grad_scale))
    padding = [size // 2 * dilation for size in weight.shape[2:]]
    ones, zeros, reach = ([size] * len(padding) for size in (1, 0, dilation))
    for tile, made_tile, activation in _activations(read, weight.dtype, shape, side):
        of_made = grad[made_tile].unflatten(0, (len(activation), *activation.shape[2:])).movedim(-1, 1)
        gradient, part, _ = torch.ops.aten.convolution_backward(
            *(
                of_made,
                activation,
                weight,
                None,
                ones,
                padding,
                reach,
                False,
                zeros,
                1,
                [True, into.needs_grad_weight, False],
            )
        )
        if into.needs_grad_weight:
            of_weight += part
        here, part_shape = read._replace(values=read.values[tile]), torch.Size([len(activation), *shape[1:]])
        sums += _collected(to_pixel_matrix(gradient), here, into.tile(tile), part_shape, side)
    return of_weight, sums[0], sums[1]


def _activations(
    read: AffineInput, dtype: torch.dtype, shape: torch.Size, side: int
) -> Iterator[tuple[slice, slice, Tensor]]:
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
        activation = to_spatial(_rectified(here, dtype, part_shape, side), torch.Size([stop - start, *made_sizes]))
        yield tile, slice(start * made_whole, stop * made_whole), activation


def _rectified(read: AffineInput, dtype: torch.dtype, shape: torch.Size, side: int = 1, relu: bool = True) -> Tensor:
    values, *vectors = _prepared(read)
    number, height, width = _planes(shape)
    num_rows, channels = number * (height // side) * (width // side), values.shape[1]
    made = values.new_empty(num_rows, channels, dtype=dtype)
    sizes = channels, values.stride(0)
    constants = {"SIDE": side, "RELU": relu, "UNIT": _unit(*sizes)}
    grid = _grid(num_rows, channels, _TILE)
    _launch(programs.rectified, grid, made, values, *vectors, num_rows, *sizes, height, width, **constants, **_TILE)
    return made


def _collected(
    grad: Tensor, read: AffineInput, into: GradAccumulator, shape: torch.Size, side: int = 1, relu: bool = True
) -> Tensor:
    """The gradient of what `_rectified` reads: adds it to what is pending, and returns both sums."""
    (values, *vectors), (grad_scale, grad_accum, first, _) = _prepared(read), into
    if first and any(size % side for size in shape[1:]):
        grad_accum.zero_()  # at the edge are pixels that are in no window
    num_rows, channels = grad.shape
    grid = _grid(num_rows, channels, _TILE)
    parts = values.new_empty(grid[1], 2, channels, dtype=torch.float32)
    tensors = parts, grad_accum, grad.contiguous(), values, *vectors, grad_scale.contiguous()
    sizes = channels, grad_accum.stride(0), values.stride(0)
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


def _prepared(read: AffineInput) -> tuple[Tensor, Tensor, Tensor]:
    return _lines(read.values), read.scale.contiguous(), read.shift.contiguous()


def _precision() -> str:
    """How PyTorch's setting has float32 multiplied in a convolution."""
    convolutions = getattr(torch.backends.cudnn, "conv", None)  # since PyTorch 2.9, which refuses mixed settings
    tf32 = torch.backends.cudnn.allow_tf32 if convolutions is None else convolutions.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"
