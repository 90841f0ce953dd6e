"""The backward of a stage: from the consumer to the first layer, accumulating each consumer's gradient of the features.

`grad_accum` holds Σ γ_l · dS_l, the gradient of the normalized features x̂, dS_l being a consumer's gradient behind its
ReLU. A channel's part becomes a gradient of the features when its last consumer is done:
dX = D + r · (G − mean(G) − x̂ · mean(G · x̂)), D being the gradient that reaches the block's output from outside.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import kernels_for, scratch
from ..kernels.interface import AffineInput, BatchNormAffine, BatchNormBackward, Conv1x1, GradAccumulator
from ..kernels.portable import to_pixel_matrix, to_spatial
from ..precision import as_dtype
from .forward import bottleneck_conv
from .groups import LayerGroup
from .saved import SavedStage
from .spec import ConsumerSpec, NormConv, StageSpec, columns_of, norm_convs
from .statistics import BackwardStatistics
from .weights import converted_weights


class Backward:
    """One backward of a stage. It outlives the node that starts it if earlier layer groups have nodes of their own.

    `grad_of_input` is a gradient of the stage's input from elsewhere, for the node that returns the sum.
    """

    def __init__(
        self, spec: StageSpec, shape: torch.Size, saved: SavedStage, grad_of_input: Tensor | None = None
    ) -> None:
        self.grad_of_input = grad_of_input
        self.spec, self.shape, self.saved, self.parameters = spec, shape, saved, saved.parameters
        self.features = saved.features
        self.kernels = kernels_for(self.features)
        self.statistics = BackwardStatistics(spec, saved.features, saved.statistics, saved.count, self._own_norms())
        self.tensors = self.parameters
        self.grads: list[Tensor | None] = [None] * len(self.parameters)
        self.next_bottleneck: Conv1x1 | None = None
        self.next_norm1: BatchNormAffine | None = None
        self.scratch: scratch.Held = {}

    def start(self, grad_consumer: Tensor | None, grad_block: Tensor | None) -> None:
        """Take the gradients of the consumer's output and of the block's, as far as there are any."""
        self.grad_block = grad_block
        self.grad_accum = torch.empty_like(self.features, memory_format=torch.contiguous_format)
        if grad_consumer is None:  # nothing will overwrite it
            self.grad_accum.zero_()
        if self.spec.consumer is not None and grad_consumer is not None:
            self._consumer(self.spec.consumer, grad_consumer)
            self.scratch.clear()  # a transition may have needed more than layers will
        self.num_channels = self.features.shape[1]

    def enter(self, group: LayerGroup, needs_grad: Sequence[bool]) -> None:
        """Continue with a layer group; `needs_grad` is of what comes before it, then of each of its tensors."""
        self.group = group
        self.tensors = converted_weights(self.parameters, self.spec.torch_dtype, group.tensors)
        self.needs_grad_input, *self.needs_grad = needs_grad

    def run_group(self) -> list[Tensor | None]:
        """The gradients of the group's tensors, where they are needed."""
        group = self.group
        for i in reversed(group.layers):
            if self._no_grad_needed_through(i):
                break
            start = self.num_channels - self.spec.growth_rate
            self._layer(i, self._grad_output(start))
            self.num_channels = start
        grads = map(self._parameter_grad, self.parameters[group.tensors], self.grads[group.tensors], self.needs_grad)
        released = list(grads)
        self.grads[group.tensors] = [None] * len(self.needs_grad)  # so that whoever has them may free them
        return released

    def grad_stage_input(self) -> Tensor:
        """The gradient of the stage's input, when all layers are done."""
        self.scratch.clear()
        return to_spatial(self._grad_features(0, self.num_channels), self.shape)

    def _no_grad_needed_through(self, i: int) -> bool:
        """Whether neither this layer nor anything before it needs a gradient."""
        stop = max(0, self.spec.layer_tensors(i).stop - self.group.tensors.start)
        return not self.needs_grad_input and not any(self.needs_grad[:stop])

    def _own_norms(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of the norms that have columns of their own in the matrix of statistics."""
        norms = []
        for i in range(len(self.spec.layers)):
            tensors = norm_convs(self.parameters, self.spec.layer_tensors(i))
            norms += tensors if self.spec.frozen else tensors[1:]
        if self.spec.frozen:
            norms += norm_convs(self.parameters, self.spec.consumer_tensors)
        return [(norm.norm_weight, norm.norm_bias) for norm in norms]

    @staticmethod
    def _parameter_grad(parameter: Tensor | None, grad: Tensor | None, needed: bool) -> Tensor | None:
        if parameter is None or grad is None or not needed:
            return None
        grad = as_dtype(grad, parameter.dtype)
        return grad if grad.dim() == parameter.dim() else grad.view_as(parameter)

    def _accumulator(self, norm: BatchNormAffine, needs_grad_weight: bool, overwrite: bool = False) -> GradAccumulator:
        """For a consumer of the features; `needs_grad_weight` is of its convolution."""
        grad_accum = columns_of(self.grad_accum, self.spec.order.slice(0, norm.weight.shape[0]))
        sums = self.statistics.sums_of(norm)
        return GradAccumulator(norm, self.spec.frozen, grad_accum, overwrite, needs_grad_weight, sums)

    def _needs_grads(self, tensors: slice) -> list[NormConv]:
        """For each norm and convolution of a slice of the tensors, which of the four need a gradient."""
        start = self.group.tensors.start
        return norm_convs(self.needs_grad, slice(tensors.start - start, tensors.stop - start))

    def _grad_output(self, start: int) -> Tensor:
        """The gradient of a layer's output, the channels written last whose gradient is not known yet."""
        grad = self._grad_features(start, self.num_channels, may_overwrite=True)
        return as_dtype(grad, self.spec.torch_dtype)

    def _grad_features(self, start: int, stop: int, may_overwrite: bool = False) -> Tensor:
        """The gradient of the channels written as number `start` to `stop`, whose consumers are all done.

        With `may_overwrite` it may be a part of grad_accum.
        """
        columns = self.spec.order.slice(start, stop)
        grad_accum = columns_of(self.grad_accum, columns)
        if self.spec.frozen:
            grad_input = grad_accum.contiguous()
        else:
            backward = self.statistics.grad_input(grad_accum, columns)
            grad_input = self.kernels.batch_norm_grad_input(backward, may_overwrite)
        if self.grad_block is not None and start >= self.spec.output_order.first:
            grad_output = columns_of(self.grad_block, self.spec.output_order.slice(start, stop))
            to_spatial(grad_input, self.shape).add_(grad_output)
        return grad_input

    def _layer(self, i: int, grad_output: Tensor) -> None:
        layer, tensors = self.spec.layers[i], self.spec.layer_tensors(i)
        first, *second = norm_convs(self.tensors, tensors)
        needs_grad = self._needs_grads(tensors)
        if layer.drop_rate:
            mask = self.saved.dropout_masks[self.spec.dropout_position(i)]
            grad_output.mul_(to_pixel_matrix(mask)).mul_(1 / (1 - layer.drop_rate or 1))
        if needs_grad[-1].conv_bias:
            self.grads[tensors.stop - 1] = grad_output.sum(0, dtype=self.statistics.dtype)
        norm1 = self._norm1(i, first)
        input, accumulator = self.statistics.input(norm1), self._accumulator(norm1, needs_grad[0].conv_weight)
        conv1 = self._weight(first)
        if not second:
            grad = self.kernels.conv3x3_backward(grad_output, input, conv1, accumulator, self.shape, layer.dilation)
        else:
            conv1 = conv1.flatten(1)
            grad_bottleneck = self._bottleneck(i, second[0], self._bottleneck_output(i, input, conv1), grad_output)
            self.next_bottleneck = self._next_bottleneck(i - 1, conv1.shape[0])
            grad = self.kernels.conv1x1_backward(grad_bottleneck, input, conv1, accumulator, self.next_bottleneck)
        self._store(tensors.start, norm1, grad)

    def _norm1(self, i: int, tensors: NormConv) -> BatchNormAffine:
        """The affine map of layer i's first norm, unless the backward of layer i + 1 has computed it already."""
        norm, self.next_norm1 = self.next_norm1, None
        return norm or self._affine(tensors, self.spec.own_position(i, 1))

    def _affine(self, tensors: NormConv, own_position: int | None) -> BatchNormAffine:
        """The affine map of a norm of the features."""
        if own_position is None:
            return self.statistics.affine(tensors)
        return self.statistics.own_norm(own_position)

    def _bottleneck_output(self, i: int, input: AffineInput, conv1: Tensor) -> Tensor:
        """relu(norm1(features)) @ conv1.T, unless it is kept or the backward of layer i + 1 has computed it already."""
        if self.spec.layers[i].keep_bottleneck:
            return self.saved.bottlenecks[self.spec.bottleneck_position(i)]
        conv = self.next_bottleneck
        if conv is None:
            conv = bottleneck_conv(input, conv1)
            self.kernels.conv1x1_forward(conv)
        return conv.output

    def _next_bottleneck(self, i: int, width: int) -> Conv1x1 | None:
        """The bottleneck of layer i, the next in the backward, where it is known already and fits this one's memory."""
        if i < 0 or self.spec.frozen or self.spec.layers[i].keep_bottleneck or self._no_grad_needed_through(i):
            return None
        if self.spec.layers[i].width != width:
            return None
        first, _ = norm_convs(self.tensors, self.spec.layer_tensors(i))
        self.next_norm1 = self.statistics.affine(first)
        return bottleneck_conv(self.statistics.input(self.next_norm1), self._weight(first).flatten(1))

    def _bottleneck(self, i: int, tensors: NormConv, output: Tensor, grad_output: Tensor) -> BatchNormBackward:
        """The gradient of the bottleneck, whose norm has statistics of its own."""
        layer, place = self.spec.layers[i], self.spec.layer_tensors(i)
        position = self.spec.own_position(i, 2)
        assert position is not None
        norm, frozen = self.statistics.own_norm(position), layer.norm2_frozen
        first, second = self._needs_grads(place)
        grad_accum = scratch.take("grad_accum", output.shape, output.dtype, output.device)
        sums = None if frozen else self.statistics.own_sums(position)
        is_complete = not frozen and self.statistics.sync_group is None
        accumulator = GradAccumulator(norm, frozen, grad_accum, True, second.conv_weight, sums, is_complete)
        grad_weight = self.kernels.conv3x3_backward(
            grad_output, norm.input(output), self._weight(tensors), accumulator, self.shape, layer.dilation
        )
        if first.conv_bias:
            self.grads[place.start + 3] = norm.grad_conv_bias(frozen)
        self._store(place.stop - 4, norm, grad_weight)
        grad_input = norm.take_grad_input()
        if frozen or grad_input is not None:
            return BatchNormBackward(output, grad_accum if grad_input is None else grad_input)
        return self.statistics.own_grad_input(output, grad_accum, position)

    def _consumer(self, consumer: ConsumerSpec, grad_output: Tensor) -> None:
        (tensors,) = norm_convs(self.tensors, self.spec.consumer_tensors)
        norm = self._affine(tensors, -1 if self.spec.frozen else None)
        (needs_grad,) = self._needs_grads(self.spec.consumer_tensors)
        grad, input = to_pixel_matrix(grad_output), self.statistics.input(norm)
        accumulator = self._accumulator(norm, needs_grad.conv_weight, overwrite=True)
        if not consumer.has_conv:
            grad_weight = None
            self.kernels.affine_backward(grad, input, accumulator)
        else:
            conv1 = self._weight(tensors).flatten(1)
            if consumer.pools:
                grad_weight = self.kernels.pooled_conv1x1_backward(grad, input, conv1, accumulator, self.shape)
            else:
                grad_weight = self.kernels.conv1x1_backward(BatchNormBackward(grad, grad), input, conv1, accumulator)
        if needs_grad.conv_bias:
            self.grads[self.spec.consumer_tensors.stop - 1] = grad.sum(0, dtype=self.statistics.dtype)
        self._store(self.spec.consumer_tensors.start, norm, grad_weight)

    def _store(self, start: int, norm: BatchNormAffine, grad_conv: Tensor | None) -> None:
        """Store the gradients of a norm and a convolution."""
        grads = [*norm.take_gradients(), grad_conv]
        self.grads[start : start + len(grads)] = grads

    def _weight(self, tensors: NormConv) -> Tensor:
        """The convolution's weight in the dtype of the convolutions."""
        return as_dtype(tensors.conv_weight, self.spec.torch_dtype)
