"""The shared-storage engine: a dense block and what consumes it as one node of the graph, keeping the features once.

`features` is one matrix for the whole stage, a row for each pixel and a column for each channel, each channel less its
batch mean. It is filled from one end to the other. Every consumer (each layer, then the transition or the last norm)
normalises the channels that were there before it by an affine map of its own; the statistics are everybody's. The
backward walks the layers from the last to the first and adds up, in `pending`, the gradient of the normalised features.
A channel's part of it becomes a gradient of the features when the last consumer of that channel is done.
"""

import contextlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...norms.sync_batch_norm import sync_group
from ..eligibility import compute_dtype
from ..kernels import kernels_for, scratch
from ..kernels.interface import AffineInput, BatchNormBackward, Conv1x1, GradAccumulator
from ..kernels.portable import halved, to_pixel_matrix, to_spatial
from ..parts import LayerParts, consumer_parts, parts_of
from . import statistics as norms
from .statistics import BatchNormAffine, ChannelSlices, SharedStatistics


def run(block: nn.Module, x: Tensor, consumer: nn.Module | None = None) -> Tensor:
    """The output of `block`, or of `consumer` (a transition or a norm) on it."""
    stage = Stage(block, consumer, x)
    return stage.finish(apply(stage, x, *stage.tensors)[0])


def run_with_features(block: nn.Module, x: Tensor, consumer: nn.Module) -> tuple[Tensor, Tensor]:
    """The output of `consumer` on the output of `block`, and the latter too."""
    stage = Stage(block, consumer, x, tap=True)
    consumed, features = apply(stage, x, *stage.tensors)
    return stage.finish(consumed), features


def apply(stage: "Stage", x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The consumer's output, or the block's; with `stage.tap`, the consumer's and the block's.

    Parameters are given as tensors, so that replicas' get their gradients.
    """
    before, (*earlier, last) = x, stage.portions
    for portion in earlier:
        before = EarlierLayers.apply(portion, before, *tensors[portion.tensors])
    return SharedStage.apply(stage, x.detach(), tensors, before, *tensors[last.tensors])


class Portion(NamedTuple):
    """Some layers of a stage, and where their tensors stand among all."""

    layers: range
    tensors: slice


PORTION_BYTES = 1 << 21
"""How large the parameters of a portion's layers may be, if it has more than one."""


class Stage:
    """The modules of a stage as they are in the forward, and where the tensors of each stand among `tensors`.

    `dtype` is the precision of convolutions; `layout` the memory format of the input, and so of the outputs.
    """

    def __init__(self, block: nn.Module, consumer: nn.Module | None, x: Tensor, tap: bool = False) -> None:
        self.dtype, self.layout, self.tap = compute_dtype(x), layout_of(x), tap
        parts = parts_of(block)
        self.layers, self.newest_first = parts.layers, parts.newest_first
        self.consumer = None if consumer is None else consumer_parts(consumer)
        first = self.layers[0].norm1
        self.sync_group, self.frozen, self.eps = sync_group(first), not first.training, first.eps
        self.frozen_inside = [layer.norm2 is not None and not layer.norm2.training for layer in self.layers]
        self.growth_rate = self.layers[0].last_conv.out_channels
        self.tensors: list[Tensor] = []
        self.places = [self._take(layer.norms, layer.convolutions) for layer in self.layers]
        if self.consumer is not None:
            conv = self.consumer.conv
            self.places.append(self._take([self.consumer.norm], [] if conv is None else [conv]))
        self.portions = self._portions()

    def _portions(self) -> list[Portion]:
        """From the first to the last, which has the consumer too. Their gradients are there one after another."""
        firsts, size = [0], 0
        for i in range(len(self.layers)):
            own = sum(tensor.nbytes for tensor in self.tensors[self.places[i]])
            if i > firsts[-1] and size + own > PORTION_BYTES:
                firsts.append(i)
                size = 0
            size += own
        starts = [self.places[first].start for first in firsts]
        nexts, stops = [*firsts[1:], len(self.layers)], [*starts[1:], len(self.tensors)]
        layers = map(range, firsts, nexts)
        return list(map(Portion, layers, map(slice, starts, stops)))

    def _take(self, normalising: Sequence[nn.Module], convolving: Sequence[nn.Module]) -> slice:
        start = len(self.tensors)
        for norm, conv in zip_longest(normalising, convolving):
            self.tensors += [norm.weight, norm.bias] if conv is None else [norm.weight, norm.bias, conv.weight]
        return slice(start, len(self.tensors))

    def finish(self, consumed: Tensor) -> Tensor:
        """What autograd does by itself to the consumer's output."""
        return consumed if self.consumer is None or self.consumer.after is None else self.consumer.after(consumed)


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By how many dimensions pictures have; there is none for signals."""


def layout_of(x: Tensor) -> torch.memory_format:
    channels_last = CHANNELS_LAST.get(x.dim())
    if channels_last is None or x.is_contiguous() or not x.is_contiguous(memory_format=channels_last):
        return torch.contiguous_format
    return channels_last


class SharedStage(torch.autograd.Function):
    """All of a stage's forward, and the backward of its consumer and its last portion.

    `values` are what the convolutions and norms of the stage hold. `before` is the input, or what stands for earlier
    portions: its gradient is of no value, but brings them the backward that they go on with.
    """

    @staticmethod
    def forward(
        ctx: Any, stage: Stage, x: Tensor, values: Sequence[Tensor], before: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        with autocast_off(x), scratch.reused():
            forward = Forward(stage, x, values)
            outputs = forward.run()
        ctx.stage, ctx.shape, ctx.num_kept = stage, forward.shape, len(forward.kept)
        ctx.count = forward.statistics.count
        ctx.save_for_backward(forward.features, forward.statistics.inv_std, *forward.kept, *values)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        backward = Backward(ctx)
        backward.enter(ctx.stage.portions[-1], ctx.needs_input_grad[3:])
        with autocast_off(backward.features), scratch.reused(backward.scratch):
            backward.begin(*grads)
            return None, None, None, *backward.go_on()


class EarlierLayers(torch.autograd.Function):
    """Of a portion that is not the last: the gradients, which so are given away before those of others are there."""

    @staticmethod
    def forward(ctx: Any, portion: Portion, before: Tensor, *tensors: Tensor) -> Tensor:
        ctx.portion = portion
        return before.new_zeros(())

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        backward = token.backward_so_far
        backward.enter(ctx.portion, ctx.needs_input_grad[1:])
        with autocast_off(backward.features), scratch.reused(backward.scratch):
            return None, *backward.go_on()


def refuse_create_graph() -> None:
    """To be asked within a backward."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "found create_graph=True, but the shared engine gives first derivatives only: "
            "use set_engine('checkpoint') for a loss that contains a gradient"
        )


def autocast_off(tensor: Tensor) -> Any:
    """Precisions are chosen here, not by operation."""
    device = tensor.device.type
    available = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if available else contextlib.nullcontext()


class Forward:
    def __init__(self, stage: Stage, x: Tensor, tensors: Sequence[Tensor]) -> None:
        self.stage, self.tensors, self.x = stage, tensors, x
        self.shape = torch.Size([x.shape[0], *x.shape[2:]])
        channels = x.shape[1] + stage.growth_rate * len(stage.layers)
        self.features = x.new_empty(self.shape.numel(), channels)
        self.kernels = kernels_for(self.features)
        self.columns = ChannelSlices(channels, stage.newest_first)
        self.statistics = SharedStatistics(self.features, self.columns, stage.frozen, stage.eps, stage.sync_group)
        self.tap = self._pictures(channels) if stage.tap or stage.consumer is None else None
        self.kept: list[Tensor] = []

    def run(self) -> tuple[Tensor, ...]:
        width = self._write(0, to_pixel_matrix(self.x))
        for i, place in enumerate(self.stage.places[: len(self.stage.layers)]):
            width = self._write(width, *self._layer(i, *self.tensors[place]))
        found = [] if self.stage.consumer is None else [self._consumed()]
        return tuple(found if self.tap is None else [*found, self.tap])

    def _pictures(self, channels: int) -> Tensor:
        shape = self.shape[0], channels, *self.shape[1:]
        return torch.empty(shape, dtype=self.x.dtype, device=self.x.device, memory_format=self.stage.layout)

    def _write(self, start: int, values: Tensor, *measured: Tensor) -> int:
        stop = start + values.shape[1]
        place = self.columns.between(start, stop)
        self.statistics.write(values, place, measured)
        if self.tap is not None:
            self.tap[:, place] = to_spatial(values, self.shape)
        return stop

    def _read(self, norm: nn.Module, weight: Tensor, bias: Tensor) -> AffineInput:
        if not self.stage.frozen:
            self.statistics.record(norm)
            return self.statistics.read(self.statistics.map(weight, bias))
        return self.statistics.read(self._keep(*norms.running_statistics(norm, self.statistics.dtype), weight, bias))

    def _keep(self, mean: Tensor, inv_std: Tensor, weight: Tensor, bias: Tensor) -> BatchNormAffine:
        self.kept += [mean, inv_std]
        return BatchNormAffine(weight, bias, inv_std, mean)

    def _layer(self, i: int, weight1: Tensor, bias1: Tensor, kernel1: Tensor, *bottleneck: Tensor) -> Sequence[Tensor]:
        """What a layer makes and, if measured, the mean and variance of that."""
        read, kernel1 = self._read(self.stage.layers[i].norm1, weight1, bias1), kernel1.to(self.stage.dtype)
        if bottleneck:
            read, kernel1 = self._bottleneck(i, read, kernel1.flatten(1), *bottleneck)
        convolution = read, kernel1, self.shape, self.stage.layers[i].dilation
        if not self.stage.frozen and not self.stage.layers[i].drop_rate:
            return self.kernels.conv3x3_forward_with_statistics(*convolution)
        made = self.kernels.conv3x3_forward(*convolution)
        if self.stage.layers[i].drop_rate:
            noise = self._noise(made, self.stage.layers[i])
            self.kept.append(noise != 0)
            made *= noise
        return [made]

    def _bottleneck(
        self, i: int, read: AffineInput, kernel1: Tensor, weight2: Tensor, bias2: Tensor, kernel2: Tensor
    ) -> tuple[AffineInput, Tensor]:
        """What the second convolution reads, and its weight."""
        norm, keep = self.stage.layers[i].norm2, self.stage.layers[i].keep_bottleneck
        squeeze = _squeeze(read, kernel1, keep)
        if self.stage.frozen_inside[i]:
            self.kernels.conv1x1_forward(squeeze)
            mean, inv_std = norms.running_statistics(norm, self.statistics.dtype)
        else:
            own = self.kernels.conv1x1_forward_with_statistics(squeeze)
            mean, variance, count = norms.synchronized_statistics(*own, read.values.shape[0], self.stage.sync_group)
            norms.update_running_statistics(norm, mean, norms.unbiased_variance(variance, count))
            inv_std = torch.rsqrt(variance + norm.eps)
        inside = self._keep(mean, inv_std, weight2, bias2)
        if keep:
            self.kept.append(squeeze.output)
        return inside.input(squeeze.output), kernel2.to(self.stage.dtype)

    def _noise(self, made: Tensor, layer: LayerParts) -> Tensor:
        """Dropout's, drawn as the plain layer draws it, so that the random stream is the same."""
        ones = self._pictures(made.shape[1]).to(made.dtype).fill_(1)
        return to_pixel_matrix(layer.dropout(ones, layer.drop_rate))

    def _consumed(self) -> Tensor:
        weight, bias, *kernel = self.tensors[self.stage.places[-1]]
        read = self._read(self.stage.consumer.norm, weight, bias)
        if not kernel:
            made = to_spatial(self.kernels.affine_forward(read), self.shape)
        elif self.stage.consumer.pools:
            made = self.kernels.pooled_conv1x1_forward(read, kernel[0].flatten(1).to(self.stage.dtype), self.shape)
            made = to_spatial(made, halved(self.shape))
        else:
            squeeze = _squeeze(read, kernel[0].flatten(1).to(self.stage.dtype), keep=True)
            self.kernels.conv1x1_forward(squeeze)
            made = to_spatial(squeeze.output, self.shape)
        made = made.contiguous(memory_format=self.stage.layout)
        return made.detach()  # or it would be a view, which autograd lets nobody write into


def _squeeze(read: AffineInput, kernel: Tensor, keep: bool = False) -> Conv1x1:
    """The first half of a layer with a bottleneck; what it makes lies in scratch unless it is to be kept."""
    shape = read.values.shape[0], kernel.shape[0]
    out = kernel.new_empty(shape) if keep else scratch.take("made", shape, kernel.dtype, kernel.device)
    return Conv1x1(read, kernel, out)


class Backward:
    def __init__(self, ctx: Any) -> None:
        self.stage, self.shape = ctx.stage, ctx.shape
        self.features, inv_std, *rest = ctx.saved_tensors
        self.kernels = kernels_for(self.features)
        self.kept, self.tensors = rest[: ctx.num_kept], rest[ctx.num_kept :]
        self.columns = ChannelSlices(self.features.shape[1], self.stage.newest_first)
        how = self.columns, self.stage.frozen, self.stage.eps, self.stage.sync_group
        self.statistics = SharedStatistics(self.features, *how, inv_std)
        self.statistics.count = ctx.count
        self.grads: list[Tensor | None] = [None] * len(self.tensors)
        self.ahead: Conv1x1 | None = None
        self.scratch: scratch.Held = {}

    def begin(self, *grads: Tensor | None) -> None:
        """Given the gradients of all outputs."""
        of_consumed, of_features = grads if self.stage.tap else (*grads, None)
        if self.stage.consumer is None:
            of_consumed, of_features = None, of_consumed
        self.direct = of_features
        self.grad_accum = torch.empty_like(self.features, memory_format=torch.contiguous_format)
        if of_consumed is None:  # only the block's own output was used
            self.grad_accum.zero_()
        if self.stage.consumer is not None:
            self._consumer(of_consumed)
            self.scratch.clear()  # a transition may have needed more than layers will
        self.width = self.features.shape[1]

    def enter(self, portion: Portion, needed: Sequence[bool]) -> None:
        """Take a portion up, of which these gradients are needed: of what comes before it, and of its tensors."""
        self.portion = portion
        self.needs_before, *self.needed = needed

    def go_on(self) -> list[Tensor | None]:
        """The gradients of what comes before the portion, and of its tensors, where they are needed."""
        portion = self.portion
        for i in reversed(portion.layers):
            if self._is_over(i):
                break
            start = self.width - self.stage.growth_rate
            self._layer(i, self._settled(start, self.width).to(self.stage.dtype))
            self.width = start
        of_tensors = map(self._of_parameter, self.tensors[portion.tensors], self.grads[portion.tensors], self.needed)
        of_before = self._of_before(portion) if self.needs_before else None
        found = [of_before, *of_tensors]
        self.grads[portion.tensors] = [None] * len(self.needed)  # whoever has them now may let them go
        return found

    def _of_before(self, portion: Portion) -> Tensor:
        if portion.layers.start == 0:
            self.scratch.clear()  # no layer is left
            return to_spatial(self._settled(0, self.width), self.shape)
        token = self.features.new_zeros(())
        token.backward_so_far = self
        return token

    def _is_over(self, i: int) -> bool:
        """Whether neither this layer nor anything before it learns."""
        until = max(0, self.stage.places[i].stop - self.portion.tensors.start)
        return not self.needs_before and not any(self.needed[:until])

    @staticmethod
    def _of_parameter(parameter: Tensor, grad: Tensor | None, needed: bool) -> Tensor | None:
        return grad.to(parameter.dtype).view_as(parameter) if needed and grad is not None else None

    def _map(self, weight: Tensor, bias: Tensor) -> BatchNormAffine:
        return self._kept_map(weight, bias) if self.stage.frozen else self.statistics.map(weight, bias)

    def _kept_map(self, weight: Tensor, bias: Tensor) -> BatchNormAffine:
        inv_std, mean = self.kept.pop(), self.kept.pop()
        return BatchNormAffine(weight, bias, inv_std, mean)

    def _into(self, norm: BatchNormAffine, kernel: int, overwrite: bool = False) -> GradAccumulator:
        """Of a consumer whose kernel stands at such a place among the tensors."""
        grad_accum = self.grad_accum[:, self.columns.between(0, norm.weight.shape[0])]
        return GradAccumulator(norm.grad_scale(self.stage.frozen), grad_accum, overwrite, self._learns(kernel))

    def _learns(self, tensor: int) -> bool:
        return self.needed[tensor - self.portion.tensors.start]

    def _settled(self, start: int, stop: int) -> Tensor:
        """The gradient of the features themselves, for channels that no consumer is left of."""
        place = self.columns.between(start, stop)
        batch_norm_grad_input = self.statistics.grad_input(self.grad_accum, place)
        if self.direct is not None:
            to_spatial(batch_norm_grad_input, self.shape).add_(self.direct[:, place])
        return batch_norm_grad_input

    def _layer(self, i: int, grad: Tensor) -> None:
        place = self.stage.places[i]
        weight1, bias1, kernel1, *bottleneck = self.tensors[place]
        kernel1 = kernel1.to(self.stage.dtype)
        drop_rate = self.stage.layers[i].drop_rate
        if drop_rate:
            grad.mul_(self.kept.pop()).div_(1 - drop_rate or 1)
        if not bottleneck:
            norm1 = self._map(weight1, bias1)
            read = self.statistics.read(norm1)
            convolution = kernel1, self._into(norm1, place.start + 2), self.shape, self.stage.layers[i].dilation
            self._finish(place, norm1, *self.kernels.conv3x3_backward(grad, read, *convolution))
            return
        made = self.kept.pop() if self.stage.layers[i].keep_bottleneck else None
        norm2 = self._kept_map(*bottleneck[:2])
        norm1 = self._map(weight1, bias1)
        read, kernel1 = self.statistics.read(norm1), kernel1.flatten(1)
        if made is None:
            made = self._made(read, kernel1)
        of_made = self._bottleneck(i, norm2, made, bottleneck[2].to(self.stage.dtype), grad)
        self.ahead = self._ahead(i - 1, kernel1.shape[0])
        into = self._into(norm1, place.start + 2)
        found = self.kernels.conv1x1_backward(of_made, read, kernel1, into, self.ahead)
        self._finish(place, norm1, *found)

    def _made(self, read: AffineInput, kernel: Tensor) -> Tensor:
        """The bottleneck, made again."""
        squeeze = self.ahead
        if squeeze is None:
            squeeze = _squeeze(read, kernel)
            self.kernels.conv1x1_forward(squeeze)
        return squeeze.output

    def _ahead(self, i: int, width: int) -> Conv1x1 | None:
        """The bottleneck of the layer that comes next, where it can be told now and takes the place of one as wide."""
        if i < 0 or self.stage.frozen or self.stage.layers[i].keep_bottleneck or self._is_over(i):
            return None
        weight, bias, kernel, *bottleneck = self.tensors[self.stage.places[i]]
        if not bottleneck or kernel.shape[0] != width:
            return None
        read = self.statistics.read(self.statistics.map(weight, bias))
        return _squeeze(read, kernel.to(self.stage.dtype).flatten(1))

    def _bottleneck(
        self, i: int, norm: BatchNormAffine, made: Tensor, kernel: Tensor, grad: Tensor
    ) -> BatchNormBackward:
        """The gradient of the bottleneck, whose norm has statistics of its own."""
        frozen = self.stage.frozen_inside[i]
        grad_accum = scratch.take("pending", made.shape, made.dtype, made.device)
        stop = self.stage.places[i].stop
        into = GradAccumulator(
            norm.grad_scale(frozen), grad_accum, overwrite=True, needs_grad_weight=self._learns(stop - 1)
        )
        convolution = kernel, into, self.shape, self.stage.layers[i].dilation
        of_kernel, *sums = self.kernels.conv3x3_backward(grad, norm.input(made), *convolution)
        norm.set_gradients(*sums)
        self.grads[stop - 3 : stop] = norm.grad_weight, norm.grad_bias, of_kernel
        return norms.batch_norm_backward(made, norm, frozen, grad_accum, self.statistics.count, self.stage.sync_group)

    def _consumer(self, grad: Tensor | None) -> None:
        place = self.stage.places[-1]
        weight, bias, *kernel = self.tensors[place]
        norm = self._map(weight, bias)
        if grad is None:
            return
        grad, read = to_pixel_matrix(grad), self.statistics.read(norm)
        into = self._into(norm, place.stop - 1, overwrite=True)
        if not kernel:
            found = None, *self.kernels.affine_backward(grad, read, into)
        elif self.stage.consumer.pools:
            found = self.kernels.pooled_conv1x1_backward(
                grad, read, kernel[0].flatten(1).to(self.stage.dtype), into, self.shape
            )
        else:
            of_made = norms.passthrough_backward(grad, grad, self.statistics.dtype)
            found = self.kernels.conv1x1_backward(of_made, read, kernel[0].flatten(1).to(self.stage.dtype), into)
        self._finish(place, norm, *found)

    def _finish(self, place: slice, norm: BatchNormAffine, of_kernel: Tensor | None, *sums: Tensor) -> None:
        norm.set_gradients(*sums)
        self.statistics.absorb(norm)
        found = [norm.grad_weight, norm.grad_bias, *([] if of_kernel is None else [of_kernel])]
        self.grads[place.start : place.start + len(found)] = found
