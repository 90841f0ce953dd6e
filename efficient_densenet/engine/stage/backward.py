"""The backward of a stage: from the consumer to the first layer, accumulating each consumer's gradient of the features.

`grad_accum` holds G = Σ γ · g, summed over the consumers: the gradient of the normalized features x̂, in a matrix for
each group of columns that leaves the stage by itself. γ is the weight
of a consumer's norm, and g the gradient of this norm's output. When the last consumer of a channel is done, the
channel's G becomes the gradient of the features, D + r · (G − mean(G) − x̂ · mean(G · x̂)), with r = 1 / sqrt(var +
eps), and with D the gradient of the block's output.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ..._tensors import as_dtype
from ...kernels import kernels_for
from ...kernels.activations import ActivationSpec
from ...kernels.interface import AffineInput, BatchNormBackward, Conv1x1, GradAccumulator, Gradients, ImageConv
from ...kernels.portable import to_pixel_matrix, to_spatial
from ...kernels.row_tiles import tiles
from ..operator import BackwardInputs
from .forward import conv1x1, converted_weights
from .masks import bits, drop_
from .max_pooled import MaxPooled
from .spec import PER_NORM, SKIPPED, ConsumerSpec, LayerSpec, SavedStage, StageSpec, norm_convs
from .statistics import BackwardStatistics


class Backward:
    """One backward of a stage."""

    def __init__(self, spec: StageSpec, inputs: BackwardInputs) -> None:
        saved: SavedStage = inputs.saved
        self.spec, self.shape, self.features = spec, inputs.shape, spec.own(saved.features)
        spec.check_shapes(saved.parameters, len(inputs.shape) - 1)  # `weight.data` may be another tensor by now
        self.grad_consumer = None if spec.consumer is None else inputs.grad_outputs[0]
        self.grad_block = inputs.grad_outputs[-1] if spec.returns_features else None
        if self.grad_block is not None and spec.room:
            self.grad_block = to_spatial(self.grad_block, self.shape)
        self.kernels = kernels_for(self.features, spec.activations)
        self.statistics = BackwardStatistics(spec, self.features, saved.statistics, saved.count)
        self.tensors = norm_convs(converted_weights(saved.parameters, spec.torch_dtype, self.kernels))
        self.needs_grad_input, *self.needs_grad = inputs.needs_grad
        self.needs_grad_input |= spec.skip > 0 and self.needs_grad[-1]
        self.needs_grads = norm_convs(self.needs_grad)
        self.dropout_masks, self.bottlenecks = saved.dropout_masks, list(saved.bottlenecks)
        self.codes = saved.codes
        self.grads: list[Tensor | None] = [None] * len(saved.parameters)
        self.next_bottleneck: Conv1x1 | None = None
        self.grad_bottleneck: Tensor | None = None
        self.grad_output: Tensor | None = None
        self.grad_product: tuple[Tensor, Tensor] | None = None
        self.is_written = False

    def run(self) -> list[Tensor | None]:
        """The gradients of the stage's input and of its parameters."""
        pixels, groups = len(self.features), self.spec.grad_groups
        self.grad_accum = [(each, self.features.new_empty(pixels, each.stop - each.start)) for each in groups]
        if self.spec.consumer is not None and self.grad_consumer is not None:
            self._consumer(self.spec.consumer, self.grad_consumer)
        for i in reversed(range(len(self.spec.layers))):
            if self._no_grad_needed_through(i):
                break
            grad_output = self._grad_features(i + 1, may_overwrite=True)
            self._layer(i, as_dtype(grad_output, self.spec.torch_dtype))
        self.grad_bottleneck = self.grad_output = None
        if self.spec.skip:
            del self.grad_accum[2:]
            self.grads[-1] = self._grad_features(SKIPPED) if self.needs_grad[-1] else None
        return [to_spatial(self._grad_features(0), self.shape) if self.needs_grad_input else None, *self.grads]

    def _no_grad_needed_through(self, i: int) -> bool:
        """Whether neither this layer nor anything before it needs a gradient."""
        return not self.needs_grad_input and not any(self.needs_grad[: self.spec.layer_norms[i].stop * PER_NORM])

    def _accumulators(self, number: int) -> list[tuple[slice, GradAccumulator]]:
        """Where the consumer after norm `number`, a norm of the features, accumulates, for each group of the channels
        that it reads. The first consumer overwrites what is there."""
        read, sums, accumulators = cast(slice, self.spec.norms[number].features), self.statistics.sums(number), []
        settings = not self.is_written, self.needs_grads[number].conv_weight
        for group, matrix in self.grad_accum:
            start, stop = max(group.start, read.start), min(group.stop, read.stop)
            if start < stop:
                columns = slice(start - read.start, stop - read.start)
                grad_accum = matrix[:, start - group.start : stop - group.start]
                accumulator = GradAccumulator(grad_accum, *settings, None if sums is None else sums[:, columns])
                accumulators.append((columns, accumulator))
        self.is_written = True
        return accumulators

    def _grad_features(self, segment: int, may_overwrite: bool = False) -> Tensor:
        """The gradient of a segment of the features, whose consumers are all done.

        With `may_overwrite` the result may be a view of grad_accum.
        """
        columns = self.spec.segment_columns(segment)
        in_place = segment <= 0 and self.spec.skip > 0  # a matrix of its own
        if not self.is_written:
            grad_input = self.features.new_zeros(len(self.features), columns.stop - columns.start)
        else:
            group, matrix = next(each for each in self.grad_accum if each[0].start <= columns.start < each[0].stop)
            grad_accum = matrix[:, columns.start - group.start : columns.stop - group.start]
            grad_input = self._finished(columns, grad_accum, may_overwrite, in_place)
        if self.grad_block is not None and (segment > 0 or not self.spec.new_features_only):
            columns_of_output = self.spec.output_order.slice(*self.spec.channels_of(segment))
            to_spatial(grad_input, self.shape).add_(self.grad_block[:, columns_of_output])
        if self.grad_product is not None:
            grad, weight = self.grad_product
            grad_input.addmm_(grad, weight[:, columns])
        return grad_input

    def _finished(self, columns: slice, grad_accum: Tensor, may_overwrite: bool, in_place: bool) -> Tensor:
        """The gradient of these columns of the features, from the sum of their consumers' gradients."""
        if self.spec.frozen:
            return grad_accum.contiguous()
        backward = self.statistics.grad_features(columns, grad_accum)
        if in_place:
            for rows in tiles(grad_accum, self.statistics.dtype):
                tile = backward._replace(values=backward.values[rows], grad_accum=grad_accum[rows])
                grad_input = self.kernels.batch_norm_grad_input(tile, may_overwrite=True)
                if grad_input is not tile.grad_accum:
                    tile.grad_accum.copy_(grad_input)
            return grad_accum
        previous, self.grad_output = self.grad_output, None
        if previous is not None and (not may_overwrite or previous.shape != grad_accum.shape):
            previous = None
        grad_input = self.kernels.batch_norm_grad_input(backward, may_overwrite, previous)
        self.grad_output = grad_input if may_overwrite else None
        return grad_input

    def _layer(self, i: int, grad_output: Tensor) -> None:
        layer, norms = self.spec.layers[i], self.spec.layer_norms[i]
        first, last = norms.start, norms.stop - 1
        if layer.drop_rate:
            mask, bit = bits(self.dropout_masks, i)
            drop_(grad_output, mask, layer.drop_rate, bit)
        if self.needs_grads[last].conv_bias:
            self._store_bias(last, grad_output.sum(0, dtype=self.statistics.dtype))
        if not layer.width:
            input, weight, parts = self._input(first, layer.activation1), self.tensors[first].conv_weight, []
            for columns, accumulator in self._accumulators(first):
                conv = ImageConv(input.columns(columns), weight[:, columns], self.shape, layer.dilation)
                parts.append(self.kernels.conv3x3_backward(grad_output, conv, accumulator))
            self._store(first, joined(parts))
            return
        conv = self._bottleneck(i)
        grad_bottleneck = self._grad_bottleneck(layer, last, conv.output, grad_output)
        self.next_bottleneck = self._next_bottleneck(i - 1, layer, conv.output)
        ((_, accumulator),) = self._accumulators(first)
        arguments = grad_bottleneck, conv.input, conv.weight, accumulator
        self._store(first, self.kernels.conv1x1_backward(*arguments, self.next_bottleneck))

    def _input(self, number: int, activation: ActivationSpec) -> AffineInput:
        """The input of the convolution after norm `number`, a norm of the features, and its activation."""
        return self.statistics.input(number, self.tensors[number], activation)

    def _bottleneck(self, i: int) -> Conv1x1:
        """Layer i's 1×1 convolution. Its output is saved, or was computed in the backward of layer i + 1, or is
        computed here."""
        conv, self.next_bottleneck = self.next_bottleneck, None
        if conv is not None:
            return conv
        number, layer = self.spec.layer_norms[i].start, self.spec.layers[i]
        input, weight = self._input(number, layer.activation1), self.tensors[number].conv_weight.flatten(1)
        if layer.keep_bottleneck:
            return Conv1x1(input, weight, self.bottlenecks.pop())
        conv = conv1x1(input, weight)
        self.kernels.conv1x1_forward(conv)
        return conv

    def _next_bottleneck(self, i: int, current: LayerSpec, memory: Tensor) -> Conv1x1 | None:
        """The 1×1 convolution of layer i, the next layer in the backward, if it can be computed already: its norm is
        known, and its output may overwrite `memory`, the recomputed bottleneck of the current layer."""
        if i < 0 or self.spec.frozen or self.spec.layers[i].keep_bottleneck or self._no_grad_needed_through(i):
            return None
        if self.spec.layers[i].width != current.width:
            return None
        number, activation = self.spec.layer_norms[i].start, self.spec.layers[i].activation1
        input, weight = self._input(number, activation), self.tensors[number].conv_weight.flatten(1)
        return conv1x1(input, weight) if current.keep_bottleneck else Conv1x1(input, weight, memory)

    def _grad_bottleneck(self, layer: LayerSpec, number: int, output: Tensor, grad_output: Tensor) -> BatchNormBackward:
        """The gradient of the bottleneck, from the gradient of the layer's output; `number` is the norm between."""
        norm, sums = self.statistics.norm(number, self.tensors[number]), self.statistics.sums(number)
        if self.grad_bottleneck is None or self.grad_bottleneck.shape != output.shape:
            self.grad_bottleneck = None  # freed before another is allocated
            self.grad_bottleneck = torch.empty_like(output, memory_format=torch.contiguous_format)
        grad_accum = self.grad_bottleneck
        needs_grad_weight = self.needs_grads[number].conv_weight
        only_consumer = not norm.frozen and self.spec.sync_group is None
        accumulator = GradAccumulator(grad_accum, True, needs_grad_weight, sums, only_consumer)
        input, weight = AffineInput(output, norm, layer.activation2), self.tensors[number].conv_weight
        conv = ImageConv(input, weight, self.shape, layer.dilation)
        grads = self.kernels.conv3x3_backward(grad_output, conv, accumulator)
        if self.needs_grads[number - 1].conv_bias:
            self._store_bias(number - 1, norm.grad_conv_bias(grads.norm_bias))
        self._store(number, grads)
        if norm.frozen:
            return BatchNormBackward(output, grad_accum)
        if grads.norm_input is not None:
            return BatchNormBackward(grads.norm_input, grads.norm_input)
        return self.statistics.grad_input(number, output, grad_accum)

    def _consumer(self, consumer: ConsumerSpec, grad_output: Tensor) -> None:
        number, grad = self.spec.consumer_norm, to_pixel_matrix(grad_output)
        grad_bias = None
        if not consumer.has_norm:
            weight = self.tensors[number].conv_weight
            self.grad_product = grad, weight.flatten(1)
            if self.needs_grads[number].conv_bias:
                self._store_bias(number, grad.sum(0, dtype=self.statistics.dtype))
            if self.needs_grads[number].conv_weight:
                self.grads[number * PER_NORM + 2] = self.statistics.grad_weight(grad).view_as(weight)
            return
        input, ((_, accumulator),) = self._input(number, consumer.activation), self._accumulators(number)
        if not consumer.has_conv:
            grads = self.kernels.affine_backward(grad, input, accumulator)
        else:
            conv1 = self.tensors[number].conv_weight.flatten(1)
            conv = ImageConv(input, conv1, self.shape)
            if consumer.pools:
                grads = self.kernels.pooled_conv1x1_backward(grad, conv, accumulator)
            elif consumer.max_pools:
                pooled = MaxPooled(self.kernels, conv, consumer.drop_rate)
                grads, grad_bias = pooled.backward(grad, self.codes, accumulator, self.statistics.dtype)
            else:
                grads = self.kernels.conv1x1_backward(BatchNormBackward(grad, grad), input, conv1, accumulator)
        self._store(number, grads)
        if self.needs_grads[number].conv_bias:
            self._store_bias(number, grad.sum(0, dtype=self.statistics.dtype) if grad_bias is None else grad_bias)

    def _store(self, number: int, grads: Gradients) -> None:
        """Store the gradients of norm `number`, and of the weight of the convolution after it."""
        start, tensors, conv_weight = number * PER_NORM, self.tensors[number], grads.conv_weight
        if conv_weight is not None and conv_weight.dim() != tensors.conv_weight.dim():
            conv_weight = conv_weight.view_as(tensors.conv_weight)
        self.grads[start : start + 3] = grads.norm_weight, grads.norm_bias, conv_weight

    def _store_bias(self, number: int, grad: Tensor) -> None:
        """Store the gradient of the bias of the convolution after norm `number`."""
        self.grads[number * PER_NORM + 3] = grad


def joined(parts: Sequence[Gradients]) -> Gradients:
    """The gradients of a norm and of the weight after it, from those of its channels in groups."""
    if len(parts) == 1:
        return parts[0]
    weights = [each.conv_weight for each in parts if each.conv_weight is not None]
    norm = torch.cat([each.norm_weight for each in parts]), torch.cat([each.norm_bias for each in parts])
    return Gradients(*norm, torch.cat(weights, 1) if weights else None)
