"""The ImageNet stem as one node of the graph: convolution, batch norm, ReLU and max pooling, of which only the input is
kept.

What the convolution gives is the largest tensor of the whole network. It is made again in the backward, once, and what
follows from it exists for some pictures at a time. Where the maxima lie is found as PyTorch finds them, so that it is
the same ones in ties.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..norms.sync_batch_norm import sync_group
from .eligibility import can_share_stem, compute_dtype, convolved_size
from .kernels import scratch
from .kernels.portable import CONV_BY_DIMS, TILE_BYTES, accumulation_dtype, to_spatial
from .shared import statistics as norms
from .shared.stage import CHANNELS_LAST, autocast_off, layout_of, refuse_create_graph
from .shared.statistics import BatchNormAffine


class Stem(NamedTuple):
    """The modules as they stand in a network, each of exactly the usual class."""

    conv: nn.Module
    norm: nn.Module
    relu: nn.Module
    pool: nn.Module


def stem_at_the_start(modules: Sequence[nn.Module], x: Tensor) -> Stem | None:
    """The first four of `modules`, where they are a stem that can run as one on `x`."""
    stem = Stem(*modules[:4]) if len(modules) >= 4 else None
    return stem if stem is not None and can_share_stem(*stem, x) else None


def run(stem: Stem, x: Tensor) -> Tensor:
    """What its modules would give."""
    conv, norm = stem.conv, stem.norm
    bias = [] if conv.bias is None else [conv.bias]
    return SharedStem.apply(Settings(stem, x), x, norm.weight, norm.bias, conv.weight, *bias)


def output_dtype(x: Tensor) -> torch.dtype:
    """The precision of maxima: that of convolutions, but where autocast has an opinion (of volumes on a CPU)."""
    pool = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}[x.dim()]
    return pool(x.new_zeros([1] * x.dim(), dtype=compute_dtype(x)), 1).dtype


class Settings:
    """The modules as they are in the forward."""

    def __init__(self, stem: Stem, x: Tensor) -> None:
        conv, self.norm, _, pool = stem
        self.dtype, self.accumulation_dtype = compute_dtype(x), accumulation_dtype(compute_dtype(x))
        self.output_dtype = output_dtype(x)
        self.frozen, self.eps, self.sync_group = not self.norm.training, self.norm.eps, sync_group(self.norm)
        self.conv = Convolution(conv.stride, conv.padding, conv.dilation, conv.groups)
        sizes = pool.kernel_size, pool.stride, pool.padding, pool.dilation
        self.pool = Pooling(*(_each(size, x.dim() - 2) for size in sizes), pool.ceil_mode)


def _each(size: int | tuple[int, ...], dims: int) -> list[int]:
    return list(size) if isinstance(size, tuple) else [size] * dims


class Convolution(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return CONV_BY_DIMS[x.dim() - 2](x, weight, bias, *self)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of the input, the weight and the bias."""
        how = self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups
        return torch.ops.aten.convolution_backward(grad, x, weight, [weight.shape[0]], *how, wanted)


class Pooling(NamedTuple):
    """The maximum of each window. Signals are pictures of one row, as they are to PyTorch."""

    kernel_size: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil_mode: bool

    def run(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The maxima, and where they lie."""
        if values.dim() == 3:
            return tuple(found.squeeze(2) for found in self._of_a_row().run(values.unsqueeze(2)))
        pool = F.max_pool2d if values.dim() == 4 else F.max_pool3d
        return pool(values, *self, return_indices=True)

    def gradient(self, grad: Tensor, places: Tensor, like: Tensor) -> Tensor:
        """The gradient of values that lie in memory as `like` does."""
        if grad.dim() == 3:
            row, tensors = self._of_a_row(), (tensor.unsqueeze(2) for tensor in (grad, places, like))
            return row.gradient(*tensors).squeeze(2)
        name = f"max_pool{grad.dim() - 2}d_with_indices_backward"
        return getattr(torch.ops.aten, name)(grad, like, *self, places)

    def _of_a_row(self) -> "Pooling":
        kernel_size, stride, padding, dilation, ceil_mode = self
        return Pooling([1, *kernel_size], [1, *stride], [0, *padding], [1, *dilation], ceil_mode)


class SharedStem(torch.autograd.Function):
    """`apply(settings, x, norm's weight and bias, convolution's weight and perhaps bias)`."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, x: Tensor, *tensors: Tensor) -> Tensor:
        with autocast_off(x), scratch.reused():
            made = Made(settings, x, tensors)
            mean, inv_std, ctx.count = _statistics(made)
            out = _pooled(made, mean, inv_std)
        ctx.settings = settings
        ctx.save_for_backward(x, mean, inv_std, *tensors)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        if grad is None:
            return None, *[None] * len(ctx.needs_input_grad[1:])
        x, mean, inv_std, *tensors = ctx.saved_tensors
        with autocast_off(x), scratch.reused():
            made = Made(ctx.settings, x, tensors)
            found = Backward(made, mean, inv_std, ctx.count, ctx.needs_input_grad[1:]).run(grad)
        wanted = zip(found, (x, *tensors), ctx.needs_input_grad[1:], strict=True)
        return None, *(of_it.to(it.dtype) if needed else None for of_it, it, needed in wanted)


Tile = tuple[slice, slice]
"""Pictures, and channels of them."""


def _slices(count: int, each: int) -> Iterator[slice]:
    each = max(1, each)
    for start in range(0, count, each):
        yield slice(start, min(start + each, count))


class Made:
    """What the convolution gives, all of it, and what it is made from."""

    def __init__(self, settings: Settings, x: Tensor, tensors: Sequence[Tensor]) -> None:
        self.settings, self.x = settings, x.to(settings.dtype)
        self.norm_weight, self.norm_bias, weight, *bias = tensors
        self.weight = weight.to(settings.dtype)
        self.bias = bias[0].to(settings.dtype) if bias else None
        self.size = convolved_size(x.shape[2:], weight.shape[2:], *settings.conv[:3])
        self.all_but_channels = [0, *range(2, x.dim())]
        self.values = self._convolved()
        self.layout = layout_of(self.values)

    def _convolved(self) -> Tensor:
        """Some pictures at a time too, since a convolution may need as much room again for its own."""
        values = None
        for some in self.pictures():
            part = self.settings.conv.run(self.x[some], self.weight, self.bias)
            if len(part) == len(self.x):
                return part
            values = self.new(part, part.dtype, layout_of(part)) if values is None else values
            values[some] = part
        return values

    def pictures(self) -> Iterator[slice]:
        """Some pictures at a time."""
        return _slices(len(self.x), self._channels_in_a_tile() // len(self.weight))

    def tiles(self) -> Iterator[Tile]:
        """Some pictures at a time, or where one is too large, some channels of it."""
        for some in self.pictures():
            yield from self.tiles_of(some)

    def tiles_of(self, some: slice) -> Iterator[Tile]:
        for channels in _slices(len(self.weight), self._channels_in_a_tile()):
            yield some, channels

    def _channels_in_a_tile(self) -> int:
        tile_bytes = TILE_BYTES["cpu" if self.x.device.type == "cpu" else "cuda"]
        return tile_bytes // (self.size.numel() * self.settings.accumulation_dtype.itemsize)

    def centred(self, tile: Tile, mean: Tensor, layout: torch.memory_format) -> Tensor:
        """Values less their mean, in the precision of sums and in scratch."""
        values = self.values[tile]
        if layout is torch.contiguous_format:
            room = scratch.take("wide", values.shape, mean.dtype, mean.device)
        else:
            rows = values.numel() // values.shape[1], values.shape[1]
            shape = torch.Size([values.shape[0], *values.shape[2:]])
            room = to_spatial(scratch.take("wide", rows, mean.dtype, mean.device), shape)
        return torch.sub(values, self.by_channel(mean, tile), out=room)

    def maxima(self, tile: Tile, mean: Tensor, norm: BatchNormAffine) -> tuple[Tensor, Tensor]:
        """What the pooling gives, and where it lies."""
        wide = self.centred(tile, mean, self._pooling_layout(tile))
        normalised = torch.addcmul(self.by_channel(norm.shift, tile), wide, self.by_channel(norm.scale, tile), out=wide)
        # The ReLU of rounded values, as some of them are equal only then.
        return self.settings.pool.run(normalised.to(self.settings.dtype).clamp_min_(0))

    def _pooling_layout(self, tile: Tile) -> torch.memory_format:
        """On processors PyTorch finds the maxima of eight channels or more side by side, ten times as fast."""
        if self.x.device.type == "cpu" and self.x.dim() > 3 and len(self.weight[tile[1]]) >= 8:
            return CHANNELS_LAST[self.x.dim()]
        return self.layout

    def by_channel(self, values: Tensor, tile: Tile) -> Tensor:
        return values[tile[1]].view(-1, *[1] * (self.x.dim() - 2))

    def new(self, like: Tensor, dtype: torch.dtype, layout: torch.memory_format | None = None) -> Tensor:
        """Room for all pictures, given what there is of some."""
        shape, layout = (len(self.x), len(self.weight), *like.shape[2:]), layout or self.layout
        return torch.empty(shape, dtype=dtype, device=like.device, memory_format=layout)


def _statistics(made: Made) -> tuple[Tensor, Tensor, int | Tensor]:
    """Mean and reciprocal deviation, and of how many values; the norm takes note of them."""
    settings, values = made.settings, made.values
    count = values.numel() // values.shape[1]
    if settings.frozen:
        return *norms.running_statistics(settings.norm, settings.accumulation_dtype), count
    mean = values.mean(made.all_but_channels, dtype=settings.accumulation_dtype)
    square_sum = torch.zeros_like(mean)
    for tile in made.tiles():
        square_sum[tile[1]] += made.centred(tile, mean, made.layout).square_().sum(made.all_but_channels)
    mean, variance, count = norms.synchronized_statistics(mean, square_sum.div_(count), count, settings.sync_group)
    norms.update_running_statistics(settings.norm, mean, norms.unbiased_variance(variance, count))
    return mean, torch.rsqrt(variance + settings.eps), count


def _pooled(made: Made, mean: Tensor, inv_std: Tensor) -> Tensor:
    norm, out = BatchNormAffine(made.norm_weight, made.norm_bias, inv_std), None
    for tile in made.tiles():
        maxima, _ = made.maxima(tile, mean, norm)
        out = made.new(maxima, made.settings.output_dtype) if out is None else out
        out[tile] = maxima
    return out


class Backward:
    """Over all pictures twice: what reaches the statistics must be known before what reaches the values is."""

    def __init__(self, made: Made, mean: Tensor, inv_std: Tensor, count: int | Tensor, needed: Sequence[bool]) -> None:
        self.made, self.settings, self.mean, self.count = made, made.settings, mean, count
        self.norm = BatchNormAffine(made.norm_weight, made.norm_bias, inv_std)
        self.needs_x, _, _, *self.needs_convolution = needed
        self.places: Tensor | None = None

    def run(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of the input and each parameter."""
        self._sum_up(grad)
        found = [None] * (1 + len(self.needs_convolution))
        if self.needs_x or any(self.needs_convolution):
            found = self._convolution(grad)
        of_x, *rest = found
        return of_x, self.norm.grad_weight, self.norm.grad_bias, *rest

    def _sum_up(self, grad: Tensor) -> None:
        """The norm's own gradients. Notes where the maxima lie: -1 for those that the ReLU shut."""
        grad_sum, product_sum = torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        for tile in self.made.tiles():
            maxima, places = self.made.maxima(tile, self.mean, self.norm)
            maxima = maxima.contiguous(memory_format=self.made.layout)
            places = places.contiguous(memory_format=self.made.layout)
            shut = maxima <= 0
            open_grad = grad[tile].to(self.mean.dtype).masked_fill(shut, 0)
            values = self.made.values[tile].flatten(2).gather(2, places.flatten(2)).view_as(places)
            grad_sum[tile[1]] += open_grad.sum(self.made.all_but_channels)
            centred = values - self.made.by_channel(self.mean, tile)
            product_sum[tile[1]] += centred.mul_(open_grad).sum(self.made.all_but_channels)
            if self.places is None:
                self.places = self.made.new(places, torch.int32)
            self.places[tile] = places.masked_fill_(shut, -1)
        self.norm.set_gradients(grad_sum, product_sum)

    def _convolution(self, grad: Tensor) -> list[Tensor | None]:
        """The gradients of its input, its weight and its bias."""
        made, values = self.made, self.made.values
        # `values` also for their gradient, which is there for some pictures at a time.
        how = self.norm, self.settings.frozen, values, self.count, self.settings.sync_group
        read, into = norms.batch_norm_backward(values, *how)
        batch_norm_backward = read.scale, read.shift, into.grad_scale * self.norm.grad_scale(self.settings.frozen)
        wanted = [self.needs_x, *self.needs_convolution, False][:3]
        of_x, totals = torch.empty_like(made.x) if self.needs_x else None, None
        for some in made.pictures():
            for tile in made.tiles_of(some):
                values[tile] = self._of_values(tile, grad[tile], *batch_norm_backward)  # which nobody needs any more
            of_some, *parts = self.settings.conv.gradients(values[some], made.x[some], made.weight, wanted)
            if of_x is not None:
                of_x[some] = of_some
            totals = self._added(totals, parts[: len(self.needs_convolution)])
        return [of_x, *totals]

    def _of_values(self, tile: Tile, grad: Tensor, slope: Tensor, shift: Tensor, grad_scale: Tensor) -> Tensor:
        slope, shift, grad_scale = (self.made.by_channel(values, tile) for values in (slope, shift, grad_scale))
        centred = self.made.centred(tile, self.mean, self.made.layout)
        found = self._unpooled(grad, self.places[tile].long(), centred)
        return found.mul_(grad_scale).addcmul_(centred, slope).add_(shift)

    def _added(self, totals: list[Tensor | None] | None, parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """In the precision of sums, those that there are."""
        parts = [None if part is None else part.to(self.mean.dtype) for part in parts]
        if totals is None:
            return parts
        return [None if part is None else total.add_(part) for total, part in zip(totals, parts, strict=True)]

    def _unpooled(self, grad: Tensor, places: Tensor, like: Tensor) -> Tensor:
        grad = grad.to(like.dtype).masked_fill(places < 0, 0)
        return self.settings.pool.gradient(grad, places.clamp_min_(0), like)
