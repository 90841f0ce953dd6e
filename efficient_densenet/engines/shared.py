"""The shared-storage engine: a dense block and what consumes it as one node of the graph, keeping the features once.

`features` is images × channels × pixels for the whole stage, each channel less its batch mean. Every consumer (each
layer, then the transition or the last norm) normalises the first channels of it by an affine map of its own; the
statistics are everybody's. The backward walks the layers from the last to the first and adds up, in `pending`, the
gradient of the normalised features. A channel's part of it becomes a gradient of the features when the last consumer of
that channel is done.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import norms
from .kernels import portable as kernels
from .norms import Map, SharedStatistics


def run(block: nn.Module, x: Tensor, consumer: nn.Module | None = None) -> Tensor:
    """The output of `block`, or of `consumer` (a transition or a norm) on it."""
    stage = Stage(block, consumer)
    output = SharedStage.apply(stage, x, *stage.tensors)
    channels_last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return output.contiguous(memory_format=torch.channels_last) if channels_last else output


class Stage:
    """The modules of a stage, and where the tensors of each stand among `tensors`."""

    def __init__(self, block: nn.Module, consumer: nn.Module | None) -> None:
        self.layers = list(block.children())
        self.consumer = consumer
        self.consumer_norm = getattr(consumer, "norm", consumer)
        # As they are in the forward, whatever becomes of the modules before the backward.
        self.frozen, self.eps = not self.layers[0].norm1.training, self.layers[0].norm1.eps
        self.frozen_inside = [hasattr(layer, "norm2") and not layer.norm2.training for layer in self.layers]
        self.dropping = [layer.drop_rate if layer.training else 0.0 for layer in self.layers]
        self.growth_rate = list(self.layers[0].children())[-1].out_channels
        self.tensors: list[Tensor] = []
        self.places = [self._take(layer.children()) for layer in self.layers]
        if consumer is not None:
            self.places.append(self._take(consumer.children() if hasattr(consumer, "norm") else [consumer]))

    def _take(self, modules: Any) -> slice:
        start = len(self.tensors)
        for module in modules:
            if isinstance(module, nn.BatchNorm2d):
                self.tensors += [module.weight, module.bias]
            elif isinstance(module, nn.Conv2d):
                self.tensors.append(module.weight)
        return slice(start, len(self.tensors))


class SharedStage(torch.autograd.Function):
    """`apply(stage, x, *stage.tensors)`: parameters are inputs, so that replicas' get their gradients."""

    @staticmethod
    def forward(ctx: Any, stage: Stage, x: Tensor, *tensors: Tensor) -> Tensor:
        forward = Forward(stage, x, tensors)
        output = forward.run()
        ctx.stage, ctx.size, ctx.num_kept = stage, forward.size, len(forward.kept)
        ctx.save_for_backward(forward.features, forward.statistics.inverse, *forward.kept, *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "found create_graph=True, but the shared engine gives first derivatives only: "
                "use set_engine('checkpoint') for a loss that contains a gradient"
            )
        return None, *Backward(ctx).run(grad.flatten(2))


class Forward:
    def __init__(self, stage: Stage, x: Tensor, tensors: tuple[Tensor, ...]) -> None:
        self.stage, self.tensors, self.size = stage, tensors, x.shape[2:]
        self.x = x.flatten(2)
        images, channels, pixels = self.x.shape
        self.features = x.new_empty(images, channels + stage.growth_rate * len(stage.layers), pixels)
        self.statistics = SharedStatistics(self.features, stage.frozen, stage.eps)
        self.output = torch.empty_like(self.features) if stage.consumer is None else None
        self.kept: list[Tensor] = []

    def run(self) -> Tensor:
        width = self._write(0, self.x)
        for i, place in enumerate(self.stage.places[: len(self.stage.layers)]):
            width = self._write(width, self._layer(i, *self.tensors[place]))
        return self._consumed() if self.output is None else self.output.unflatten(2, self.size)

    def _write(self, start: int, values: Tensor) -> int:
        stop = start + values.shape[1]
        self.statistics.write(values, start, stop)
        if self.output is not None:
            self.output[:, start:stop] = values
        return stop

    def _map(self, norm: nn.Module, weight: Tensor, bias: Tensor) -> Map:
        if not self.stage.frozen:
            self.statistics.record(norm)
            return self.statistics.map(weight, bias)
        mean, inverse = norms.running(norm)
        self.kept += [mean, inverse]
        return Map(weight, bias, inverse, mean)

    def _layer(self, i: int, weight1: Tensor, bias1: Tensor, kernel1: Tensor, *bottleneck: Tensor) -> Tensor:
        layer = self.stage.layers[i]
        norm1 = self._map(layer.norm1, weight1, bias1)
        if bottleneck:
            weight2, bias2, kernel2 = bottleneck
            made = squeezed(self.features, norm1, kernel1)
            frozen = self.stage.frozen_inside[i]
            mean, inverse = norms.running(layer.norm2) if frozen else norms.measured(layer.norm2, made)
            self.kept += [mean, inverse]
            norm2 = Map(weight2, bias2, inverse, mean if frozen else None)
            made = kernels.convolved(kernels.rectified(made, norm2.scale, norm2.shift), kernel2, self.size)
        else:
            made = convolved(self.features, norm1, kernel1, self.size)
        if self.stage.dropping[i]:
            # Drawn as the plain layer draws it, so that the random stream is the same.
            noise = F.dropout(torch.ones_like(made.unflatten(2, self.size)), self.stage.dropping[i]).flatten(2)
            self.kept.append(noise != 0)
            made *= noise
        return made

    def _consumed(self) -> Tensor:
        weight, bias, *kernel = self.tensors[self.stage.places[-1]]
        norm = self._map(self.stage.consumer_norm, weight, bias)
        if not kernel:
            return kernels.affine(self.features, norm.scale, norm.shift).unflatten(2, self.size)
        half = torch.Size(side // 2 for side in self.size)
        output = self.features.new_empty(len(self.features), len(kernel[0]), half.numel())
        for tile, rectified in rectified_tiles(self.features, norm):
            # Pooling commutes with a 1×1 convolution, and leaves it a quarter of the work.
            kernels.product(kernel[0].flatten(1), kernels.pooled(rectified, self.size), out=output[tile])
        return output.unflatten(2, half)


class Backward:
    def __init__(self, ctx: Any) -> None:
        self.stage, self.size = ctx.stage, ctx.size
        self.features, inverse, *rest = ctx.saved_tensors
        self.kept, self.tensors = rest[: ctx.num_kept], rest[ctx.num_kept :]
        self.needs_x, *self.needed = ctx.needs_input_grad[1:]
        self.statistics = SharedStatistics(self.features, self.stage.frozen, self.stage.eps, inverse)
        self.grads: list[Tensor | None] = [None] * len(self.tensors)
        self.direct: Tensor | None = None

    def run(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        if self.stage.consumer is None:
            self.direct, self.pending = grad, torch.zeros_like(self.features)
        else:
            self.pending = torch.empty_like(self.features)
            self._consumer(grad)
        width = self.features.shape[1]
        for i in reversed(range(len(self.stage.layers))):
            if not self.needs_x and not any(self.needed[: self.stage.places[i].stop]):
                break  # neither this layer nor anything before it learns
            start = width - self.stage.growth_rate
            self._layer(i, self._settled(start, width))
            width = start
        of_x = self._settled(0, width).unflatten(2, self.size) if self.needs_x else None
        return of_x, *(grad if need else None for grad, need in zip(self.grads, self.needed, strict=True))

    def _map(self, weight: Tensor, bias: Tensor) -> Map:
        if not self.stage.frozen:
            return self.statistics.map(weight, bias)
        inverse, mean = self.kept.pop(), self.kept.pop()
        return Map(weight, bias, inverse, mean)

    def _settled(self, start: int, stop: int) -> Tensor:
        """The gradient of the features themselves, for channels that no consumer is left of."""
        settled = self.statistics.settled(self.pending[:, start:stop], start, stop)
        return settled if self.direct is None else settled.add_(self.direct[:, start:stop])

    def _layer(self, i: int, grad: Tensor) -> None:
        place = self.stage.places[i]
        weight1, bias1, kernel1, *bottleneck = self.tensors[place]
        if self.stage.dropping[i]:
            grad.mul_(self.kept.pop()).div_(1 - self.stage.dropping[i])
        inside = (self.kept.pop(), self.kept.pop()) if bottleneck else None
        norm1 = self._map(weight1, bias1)
        if inside:
            grad = self._bottleneck(i, norm1, *inside, grad)
        of_kernel = torch.zeros_like(kernel1)
        for tile, values, (rectified, scratch) in tiles(self.features, norm1, num_scratch=2):
            kernels.rectified(values, norm1.scale, norm1.shift, out=rectified)
            if bottleneck:
                of_kernel.flatten(1).add_(kernels.weight_gradient(grad[tile], rectified))
                of_rectified = kernels.input_gradient(grad[tile], kernel1.flatten(1), out=scratch)
            else:
                of_rectified, of_weight = kernels.convolution_gradients(grad[tile], rectified, kernel1, self.size)
                of_kernel += of_weight
            self._add(norm1, tile, values, kernels.masked_(of_rectified, rectified))
        self._finish(place, norm1, of_kernel)

    def _bottleneck(self, i: int, norm1: Map, inverse: Tensor, mean: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the bottleneck, which is made again for it."""
        place = self.stage.places[i]
        _, _, kernel1, weight2, bias2, kernel2 = self.tensors[place]
        made = squeezed(self.features, norm1, kernel1)
        if self.stage.frozen_inside[i]:
            norm2 = Map(weight2, bias2, inverse, mean)
        else:
            norm2 = Map(weight2, bias2, inverse)
            made.sub_(mean[:, None])
        rectified = kernels.rectified(made, norm2.scale, norm2.shift)
        grad, of_kernel = kernels.convolution_gradients(grad, rectified, kernel2, self.size)
        kernels.masked_(grad, rectified)
        del rectified
        norm2.add_sums(grad, made)
        self.grads[place.start + 3 : place.stop] = norm2.weight_gradient(), norm2.grad_sum, of_kernel
        return norm2.input_gradient(grad, made)

    def _consumer(self, grad: Tensor) -> None:
        place = self.stage.places[-1]
        weight, bias, *kernel = self.tensors[place]
        norm = self._map(weight, bias)
        self.pending.zero_()
        of_kernel = torch.zeros_like(kernel[0]) if kernel else None
        for tile, values, (rectified,) in tiles(self.features, norm, num_scratch=1):
            of_values = grad[tile]
            if kernel:
                kernels.rectified(values, norm.scale, norm.shift, out=rectified)
                pooled = kernels.pooled(rectified, self.size)
                of_kernel.flatten(1).add_(kernels.weight_gradient(of_values, pooled))
                of_pooled = kernels.input_gradient(of_values, kernel[0].flatten(1), out=pooled)
                of_values = kernels.masked_(kernels.spread(of_pooled, rectified, self.size), rectified)
            self._add(norm, tile, values, of_values)
        self._finish(place, norm, of_kernel)

    def _add(self, norm: Map, tile: slice, values: Tensor, grad: Tensor) -> None:
        norm.add_sums(grad, values)
        self.pending[tile, : values.shape[1]].addcmul_(grad, self.statistics.share(norm))

    def _finish(self, place: slice, norm: Map, of_kernel: Tensor | None) -> None:
        self.statistics.absorb(norm)
        found = [norm.weight_gradient(), norm.grad_sum, *([] if of_kernel is None else [of_kernel])]
        self.grads[place.start : place.start + len(found)] = found


def tiles(features: Tensor, norm: Map, num_scratch: int) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
    """The channels that a norm reads, a few images at a time."""
    return kernels.tiles(features[:, : len(norm.scale)], num_scratch)


def rectified_tiles(features: Tensor, norm: Map) -> Iterator[tuple[slice, Tensor]]:
    """The same, normalised and rectified."""
    for tile, values, (scratch,) in tiles(features, norm, num_scratch=1):
        yield tile, kernels.rectified(values, norm.scale, norm.shift, out=scratch)


def squeezed(features: Tensor, norm: Map, kernel: Tensor) -> Tensor:
    """The 1×1 convolution of the normalised and rectified features."""
    made = features.new_empty(len(features), len(kernel), features.shape[2])
    for tile, rectified in rectified_tiles(features, norm):
        kernels.product(kernel.flatten(1), rectified, out=made[tile])
    return made


def convolved(features: Tensor, norm: Map, kernel: Tensor, size: torch.Size) -> Tensor:
    """The 3×3 convolution of the same."""
    made = features.new_empty(len(features), len(kernel), features.shape[2])
    for tile, rectified in rectified_tiles(features, norm):
        made[tile] = kernels.convolved(rectified, kernel, size)
    return made
