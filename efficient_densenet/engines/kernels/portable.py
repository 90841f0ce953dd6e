"""The shared engine's operations in plain PyTorch, for any device.

A tensor here is a matrix of rows × channels, a row for each pixel of each picture, which is how memory in the
channels_last format lies. What is as wide as the features exists for some of the rows at a time, in scratch that stays
in a processor's cache. A gradient function returns the weight's gradient, or None where the weight does not learn, and
two sums over the rows, of the gradient after the ReLU and of its product with the values read.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from . import scratch
from .interface import AffineInput, BatchNormBackward, Conv1x1, ConvGradients, GradAccumulator

TILE_BYTES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""How large the scratch of one tile may be: some of the cache, or enough to keep many processors busy."""

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""By the number of a picture's sides."""


def to_pixel_matrix(pictures: Tensor) -> Tensor:
    """Pictures as a matrix: a view of those in channels_last, a copy of others."""
    return pictures.movedim(1, -1).flatten(0, -2)


def to_spatial(rows: Tensor, shape: torch.Size) -> Tensor:
    """A matrix as pictures, `shape` being their number, height and width (or one side, or three)."""
    return rows.unflatten(0, shape).movedim(-1, 1)


def halved(shape: torch.Size) -> torch.Size:
    return torch.Size([shape[0], *(side // 2 for side in shape[1:])])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums and statistics of values of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def batch_statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel."""
    dtype = accumulation_dtype(values.dtype)
    if values.device.type != "cpu":
        variance, mean = torch.var_mean(values.to(dtype), 0, correction=0)
        return mean, variance
    # Accurate to the last digits, as var_mean is, in a tenth of its time.
    mean, square_sum = values.mean(0, dtype=dtype), None
    for tile in tiles(values, dtype):
        part = values[tile]
        centred = torch.sub(part, mean, out=scratch.take("wide", part.shape, dtype, part.device))
        (square_sum,) = _totals((square_sum,), torch.mul(centred, centred, out=centred).sum(0))
    return mean, square_sum.div_(values.shape[0])


def affine_forward(read: AffineInput) -> Tensor:
    """scale * values + shift."""
    out = torch.empty_like(read.values, memory_format=torch.contiguous_format)
    return torch.addcmul(read.shift, read.values, read.scale, out=out)


def affine_backward(grad: Tensor, read: AffineInput, into: GradAccumulator) -> tuple[Tensor, Tensor]:
    """Of `affine`: no weight, and the two sums."""
    totals = None, None
    for tile in tiles(read.values, read.scale.dtype):
        wide = scratch.take("wide", grad[tile].shape, read.scale.dtype, grad.device)
        totals = _totals(totals, *_collect(grad[tile], read.values[tile], into.tile(tile), wide))
    return totals


def conv1x1_forward(squeeze: Conv1x1) -> None:
    for tile in tiles(squeeze.input.values, squeeze.input.scale.dtype):
        _squeeze(squeeze, tile)


def conv1x1_forward_with_statistics(squeeze: Conv1x1) -> tuple[Tensor, Tensor]:
    """The statistics of what is made."""
    conv1x1_forward(squeeze)
    return batch_statistics(squeeze.output)


def conv1x1_backward(
    grad: BatchNormBackward, read: AffineInput, weight: Tensor, into: GradAccumulator, ahead: Conv1x1 | None = None
) -> ConvGradients:
    """Does `ahead` too, which reads some of the same channels, and may overwrite what `grad` reads."""
    totals = None, None, None
    for tile, activation, wide in _rectified(read, weight.dtype):
        of_made = _settled(grad, tile)
        of_weight = _of_weight(of_made, activation, into, read.scale.dtype)
        gradient = scratch.take("gradient", activation.shape, weight.dtype, weight.device)
        torch.mm(of_made, weight, out=gradient)
        sums = _collect(_masked(gradient, activation), read.values[tile], into.tile(tile), wide)
        totals = _totals(totals, of_weight, *sums)
        if ahead is not None:
            _squeeze(ahead, tile)  # while the tile is in cache
    return totals


def conv3x3_forward(read: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1) -> Tensor:
    """A 3×3 convolution that keeps the size."""
    convolve = CONVOLVE[len(shape) - 1]
    parts = [
        to_pixel_matrix(convolve(_part(activation, shape), weight, padding=dilation, dilation=dilation))
        for _, activation, _ in _rectified(read, weight.dtype, shape[1:].numel())
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def conv3x3_forward_with_statistics(
    read: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """And the statistics of what is made."""
    out = conv3x3_forward(read, weight, shape, dilation)
    return out, *batch_statistics(out)


def conv3x3_backward(
    grad: Tensor, read: AffineInput, weight: Tensor, into: GradAccumulator, shape: torch.Size, dilation: int = 1
) -> ConvGradients:
    totals = None, None, None
    for tile, activation, wide in _rectified(read, weight.dtype, shape[1:].numel()):
        ones, zeros, reach = ([size] * (len(shape) - 1) for size in (1, 0, dilation))
        gradient, of_weight, _ = torch.ops.aten.convolution_backward(
            *(_part(grad[tile], shape), _part(activation, shape), weight),
            *(None, ones, reach, reach, False, zeros, 1, [True, into.needs_grad_weight, False]),
        )
        sums = _collect(_masked(to_pixel_matrix(gradient), activation), read.values[tile], into.tile(tile), wide)
        totals = _totals(totals, of_weight.to(read.scale.dtype) if into.needs_grad_weight else None, *sums)
    return totals


def _of_weight(of_made: Tensor, activation: Tensor, into: GradAccumulator, dtype: torch.dtype) -> Tensor | None:
    """Of a 1×1 convolution: a product whose transpose processors make faster, since it is tall rather than wide."""
    return (activation.t() @ of_made).t().to(dtype) if into.needs_grad_weight else None


def pooled_conv1x1_forward(read: AffineInput, weight: Tensor, shape: torch.Size) -> Tensor:
    """A 1×1 convolution, and the mean of every 2×2 pixels: in the other order, which is a quarter of the work."""
    shape = _slabs(shape)
    made = weight.new_empty(halved(shape).numel(), weight.shape[0])
    for tile, activation, _ in _rectified(read, weight.dtype, shape[1:].numel()):
        means = to_pixel_matrix(_means(_part(activation, shape)))
        torch.mm(means, weight.t(), out=made[_halved_tile(tile, shape)])
    return made


def pooled_conv1x1_backward(
    grad: Tensor, read: AffineInput, weight: Tensor, into: GradAccumulator, shape: torch.Size
) -> ConvGradients:
    totals, shape = (None, None, None), _slabs(shape)
    for tile, activation, wide in _rectified(read, weight.dtype, shape[1:].numel()):
        here, of_made = _part(activation, shape), grad[_halved_tile(tile, shape)]
        of_weight = _of_weight(of_made, to_pixel_matrix(_means(here)), into, read.scale.dtype)
        of_means = _part(torch.mm(of_made, weight), halved(shape))
        sums = _collect(
            _masked(to_pixel_matrix(_means_gradient(of_means, here)), activation),
            read.values[tile],
            into.tile(tile),
            wide,
        )
        totals = _totals(totals, of_weight, *sums)
    return totals


def _slabs(shape: torch.Size) -> torch.Size:
    """Volumes cut where no 2×2×2 pixels are cut, since a whole one may be large; all others as they are."""
    if len(shape) != 4 or shape[1] % 2:
        return shape
    return torch.Size([shape[0] * shape[1] // 2, 2, *shape[2:]])


def _means(pictures: Tensor) -> Tensor:
    """The mean of every 2×2 pixels."""
    if pictures.dim() == 3:  # as PyTorch does it
        return F.avg_pool2d(pictures.unsqueeze(2), (1, 2)).squeeze(2)
    if pictures.dim() == 4:
        return F.avg_pool2d(pictures, 2)
    # Which PyTorch does on a CPU in no lower precision; nor does autocast.
    return F.avg_pool3d(pictures.to(accumulation_dtype(pictures.dtype)), 2).to(pictures.dtype)


def _means_gradient(grad: Tensor, pictures: Tensor) -> Tensor:
    if pictures.dim() == 3:
        sizes, grad, pictures = [1, 2], grad.unsqueeze(2), pictures.unsqueeze(2)
        return torch.ops.aten.avg_pool2d_backward(grad, pictures, sizes, sizes, [0, 0], False, True, None).squeeze(2)
    if pictures.dim() == 4:
        return torch.ops.aten.avg_pool2d_backward(grad, pictures, [2, 2], [2, 2], [0, 0], False, True, None)
    dtype, twos = accumulation_dtype(grad.dtype), [2, 2, 2]
    wide = grad.to(dtype), pictures.to(dtype)
    return torch.ops.aten.avg_pool3d_backward(*wide, twos, twos, [0, 0, 0], False, True, None).to(grad.dtype)


def batch_norm_grad_input(grad: BatchNormBackward) -> Tensor:
    read, into = grad
    found = torch.addcmul(read.shift, read.values, read.scale)
    return found.addcmul_(into.grad_accum, into.grad_scale).to(read.values.dtype)


def _settled(grad: BatchNormBackward, tile: slice) -> Tensor:
    """The same, of a tile, in scratch."""
    read, into = grad.input.tile(tile), grad.accumulator.tile(tile)
    out = scratch.take("settled", read.values.shape, read.scale.dtype, read.values.device)
    torch.addcmul(read.shift, read.values, read.scale, out=out)
    return out.addcmul_(into.grad_accum, into.grad_scale).to(read.values.dtype)


def _squeeze(squeeze: Conv1x1, tile: slice) -> None:
    read, weight, out = squeeze
    activation, _ = _activation(read.tile(tile), weight.dtype)
    torch.mm(activation, weight.t(), out=out[tile])


def _rectified(read: AffineInput, dtype: torch.dtype, whole: int = 1) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows at a time, in multiples of `whole`: which ones, and `_activation` of them."""
    for tile in tiles(read.values, read.scale.dtype, whole):
        yield tile, *_activation(read.tile(tile), dtype)


def _activation(read: AffineInput, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is read, in `dtype`, and scratch in the precision of sums for when that is no longer needed, since it may
    be where it lies."""
    values, scale, shift = read
    wide = scratch.take("wide", values.shape, scale.dtype, values.device)
    activation = torch.addcmul(shift, values, scale, out=wide).clamp_min_(0)
    if dtype != wide.dtype:
        activation = scratch.take("narrow", values.shape, dtype, values.device).copy_(activation)
    return activation, wide


def tiles(values: Tensor, dtype: torch.dtype, whole: int = 1) -> Iterator[slice]:
    """Some rows at a time, in multiples of `whole`, of which there is scratch of `dtype`."""
    tile_bytes = TILE_BYTES["cpu" if values.device.type == "cpu" else "cuda"]
    each = max(1, tile_bytes // (values.shape[1] * dtype.itemsize * whole)) * whole
    num_rows = values.shape[0]
    for start in range(0, num_rows, each):
        yield slice(start, min(start + each, num_rows))


def _totals(totals: tuple[Tensor | None, ...], *parts: Tensor | None) -> tuple[Tensor | None, ...]:
    """What all tiles until now give together; the first one's own tensors hold it."""
    return tuple(part if total is None else total.add_(part) for total, part in zip(totals, parts, strict=True))


def _masked(gradient: Tensor, activation: Tensor) -> Tensor:
    """Set to zero, in place, where the ReLU was shut."""
    return torch.ops.aten.threshold_backward.grad_input(gradient, activation, 0, grad_input=gradient)


def _collect(gradient: Tensor, values: Tensor, into: GradAccumulator, wide: Tensor) -> tuple[Tensor, Tensor]:
    """Add the gradient to the pending one, and return its two sums."""
    if into.overwrite:
        torch.mul(gradient, into.grad_scale, out=into.grad_accum)
    else:
        into.grad_accum.addcmul_(gradient, into.grad_scale)
    if wide.dtype == gradient.dtype:
        product = torch.mul(gradient, values, out=wide)
    else:  # the product of two low precisions would be rounded
        product = wide.copy_(gradient).mul_(values)
    return gradient.sum(0, dtype=wide.dtype), product.sum(0)


def _part(rows: Tensor, shape: torch.Size) -> Tensor:
    """Rows of some of the pictures as pictures."""
    return to_spatial(rows, torch.Size([rows.shape[0] // shape[1:].numel(), *shape[1:]]))


def _halved_tile(tile: slice, shape: torch.Size) -> slice:
    """The rows of the halved pictures."""
    whole, half = shape[1:].numel(), halved(shape)[1:].numel()
    return slice(tile.start // whole * half, tile.stop // whole * half)
