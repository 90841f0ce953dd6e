"""The backward of a stage: from the consumer to the first layer, accumulating each consumer's gradient of the features.

`grad_accum` holds Σ γ_l · dS_l, the gradient of the normalized features x̂, dS_l being a consumer's gradient behind its
ReLU. A channel's part becomes a gradient of the features when its last consumer is done:
dX = D + r · (G − mean(G) − x̂ · mean(G · x̂)), D being the gradient that reaches the block's output from outside.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import kernels_for, scratch
from ..kernels.interface import AffineInput, BatchNormBackward, Conv1x1, GradAccumulator
from ..kernels.portable import to_pixel_matrix, to_spatial
from ..parts import ConsumerParts
from .batch_norm import BatchNormAffine, batch_norm_backward, identity_backward
from .forward import bottleneck_conv
from .plan import LayerGroup, NormConv, StagePlan, norm_convs
from .saved import SavedLayer, SavedNorm, SavedStage
from .statistics import SharedStatistics


class Backward:
    """One backward of a stage. It outlives the node that starts it if earlier layer groups have nodes of their own."""

    def __init__(
        self, plan: StagePlan, shape: torch.Size, count: int | Tensor, saved: SavedStage, tensors: list[Tensor | None]
    ) -> None:
        self.plan, self.shape, self.saved, self.tensors = plan, shape, saved, tensors
        self.features = saved.features
        self.kernels = kernels_for(self.features)
        settings = plan.frozen, plan.eps, plan.sync_group
        self.statistics = SharedStatistics(self.features, plan.order, *settings, saved.inv_std)
        self.statistics.count = count
        self.grads: list[Tensor | None] = [None] * len(tensors)
        self.next_bottleneck: Conv1x1 | None = None
        self.scratch: scratch.Held = {}

    def start(self, grad_consumer: Tensor | None, grad_block: Tensor | None) -> None:
        """Take the gradients of the consumer's output and of the block's, as far as there are any."""
        self.grad_block = grad_block
        self.grad_accum = torch.empty_like(self.features, memory_format=torch.contiguous_format)
        if grad_consumer is None:  # nothing will overwrite it
            self.grad_accum.zero_()
        if self.plan.consumer is not None:
            self._consumer(self.plan.consumer, grad_consumer)
            self.scratch.clear()  # a transition may have needed more than layers will
        self.num_channels = self.features.shape[1]

    def enter(self, group: LayerGroup, needs_grad: Sequence[bool]) -> None:
        """Continue with a layer group; `needs_grad` is of what comes before it, then of each of its tensors."""
        self.group = group
        self.needs_grad_input, *self.needs_grad = needs_grad

    def run_group(self) -> list[Tensor | None]:
        """The gradients of the group's tensors, where they are needed."""
        group = self.group
        for i in reversed(group.layers):
            if self._no_grad_needed_through(i):
                break
            start = self.num_channels - self.plan.growth_rate
            self._layer(i, self._grad_features(start, self.num_channels).to(self.plan.dtype))
            self.num_channels = start
        grads = map(self._parameter_grad, self.tensors[group.tensors], self.grads[group.tensors], self.needs_grad)
        released = list(grads)
        self.grads[group.tensors] = [None] * len(self.needs_grad)  # so that whoever has them may free them
        return released

    def grad_stage_input(self) -> Tensor:
        """The gradient of the stage's input, when all layers are done."""
        self.scratch.clear()
        return to_spatial(self._grad_features(0, self.num_channels), self.shape)

    def _no_grad_needed_through(self, i: int) -> bool:
        """Whether neither this layer nor anything before it needs a gradient."""
        stop = max(0, self.plan.layer_tensors[i].stop - self.group.tensors.start)
        return not self.needs_grad_input and not any(self.needs_grad[:stop])

    @staticmethod
    def _parameter_grad(parameter: Tensor | None, grad: Tensor | None, needed: bool) -> Tensor | None:
        if parameter is None or grad is None or not needed:
            return None
        return grad.to(parameter.dtype).view_as(parameter)

    def _norm_of_features(self, tensors: NormConv, saved: SavedNorm) -> BatchNormAffine:
        if self.plan.frozen:
            return _own_norm(tensors, saved)
        return self.statistics.affine(tensors.norm_weight, tensors.norm_bias)

    def _accumulator(self, norm: BatchNormAffine, needs_grad_weight: bool, overwrite: bool = False) -> GradAccumulator:
        """For a consumer of the features; `needs_grad_weight` is of its convolution."""
        grad_accum = self.grad_accum[:, self.plan.order.slice(0, norm.weight.shape[0])]
        return GradAccumulator(norm.grad_scale(self.plan.frozen), grad_accum, overwrite, needs_grad_weight)

    def _needs_grads(self, tensors: slice) -> list[NormConv]:
        """For each norm and convolution of a slice of the tensors, which of the four need a gradient."""
        start = self.group.tensors.start
        return norm_convs(self.needs_grad, slice(tensors.start - start, tensors.stop - start))

    def _grad_features(self, start: int, stop: int) -> Tensor:
        """The gradient of the channels written as number `start` to `stop`, whose consumers are all done."""
        grad_input = self.statistics.grad_input(self.grad_accum, self.plan.order.slice(start, stop))
        if self.grad_block is not None and start >= self.plan.output_order.first:
            grad_output = self.grad_block[:, self.plan.output_order.slice(start, stop)]
            to_spatial(grad_input, self.shape).add_(grad_output)
        return grad_input

    def _layer(self, i: int, grad_output: Tensor) -> None:
        layer, tensors, saved = self.plan.layers[i], self.plan.layer_tensors[i], self._take_saved(i)
        first, *second = norm_convs(self.tensors, tensors)
        needs_grad = self._needs_grads(tensors)
        conv1 = first.conv_weight.to(self.plan.dtype)
        if saved.dropout_mask is not None:
            grad_output.mul_(saved.dropout_mask).div_(1 - layer.drop_rate or 1)
        if needs_grad[-1].conv_bias:
            self.grads[tensors.stop - 1] = grad_output.sum(0, dtype=self.statistics.dtype)
        norm1 = self._norm_of_features(first, saved.norm1)
        input, accumulator = self.statistics.input(norm1), self._accumulator(norm1, needs_grad[0].conv_weight)
        if not second:
            grads = self.kernels.conv3x3_backward(grad_output, input, conv1, accumulator, self.shape, layer.dilation)
        else:
            norm2, conv1 = _own_norm(second[0], saved.norm2), conv1.flatten(1)
            output = saved.bottleneck
            if output is None:
                output = self._recomputed_bottleneck(input, conv1)
            conv2 = second[0].conv_weight.to(self.plan.dtype)
            grad_bottleneck = self._bottleneck(i, norm2, output, conv2, grad_output)
            self.next_bottleneck = self._next_bottleneck(i - 1, conv1.shape[0])
            grads = self.kernels.conv1x1_backward(grad_bottleneck, input, conv1, accumulator, self.next_bottleneck)
        self._store(tensors.start, norm1, *grads)

    def _take_saved(self, i: int) -> SavedLayer:
        """What layer i saved, which is freed when the layer is done."""
        saved, self.saved.layers[i] = self.saved.layers[i], SavedLayer()
        return saved

    def _recomputed_bottleneck(self, input: AffineInput, conv1: Tensor) -> Tensor:
        """relu(norm1(features)) @ conv1.T, unless the backward of layer i + 1 has computed it already."""
        conv = self.next_bottleneck
        if conv is None:
            conv = bottleneck_conv(input, conv1)
            self.kernels.conv1x1_forward(conv)
        return conv.output

    def _next_bottleneck(self, i: int, width: int) -> Conv1x1 | None:
        """The bottleneck of layer i, the next in the backward, where it is known already and fits this one's memory."""
        if i < 0 or self.plan.frozen or self.plan.layers[i].keep_bottleneck or self._no_grad_needed_through(i):
            return None
        first, *second = norm_convs(self.tensors, self.plan.layer_tensors[i])
        if not second or first.conv_weight.shape[0] != width:
            return None
        input = self.statistics.input(self.statistics.affine(first.norm_weight, first.norm_bias))
        return bottleneck_conv(input, first.conv_weight.to(self.plan.dtype).flatten(1))

    def _bottleneck(
        self, i: int, norm: BatchNormAffine, output: Tensor, conv: Tensor, grad_output: Tensor
    ) -> BatchNormBackward:
        """The gradient of the bottleneck, whose norm has statistics of its own."""
        frozen, tensors = self.plan.bottleneck_frozen[i], self.plan.layer_tensors[i]
        first, second = self._needs_grads(tensors)
        grad_accum = scratch.take("grad_accum", output.shape, output.dtype, output.device)
        accumulator = GradAccumulator(norm.grad_scale(frozen), grad_accum, True, second.conv_weight)
        dilation = self.plan.layers[i].dilation
        grad_weight, *sums = self.kernels.conv3x3_backward(
            grad_output, norm.input(output), conv, accumulator, self.shape, dilation
        )
        norm.set_gradients(*sums)
        self.grads[tensors.stop - 4 : tensors.stop - 1] = norm.grad_weight, norm.grad_bias, grad_weight
        if first.conv_bias:
            self.grads[tensors.start + 3] = norm.grad_conv_bias(frozen)
        return batch_norm_backward(output, norm, frozen, grad_accum, self.statistics.count, self.plan.sync_group)

    def _consumer(self, consumer: ConsumerParts, grad_output: Tensor | None) -> None:
        (tensors,) = norm_convs(self.tensors, self.plan.consumer_tensors)
        norm = self._norm_of_features(tensors, self.saved.consumer_norm)
        if grad_output is None:
            return
        (needs_grad,) = self._needs_grads(self.plan.consumer_tensors)
        grad, input = to_pixel_matrix(grad_output), self.statistics.input(norm)
        accumulator = self._accumulator(norm, needs_grad.conv_weight, overwrite=True)
        if tensors.conv_weight is None:
            grads = None, *self.kernels.affine_backward(grad, input, accumulator)
        else:
            conv1 = tensors.conv_weight.flatten(1).to(self.plan.dtype)
            if consumer.pools:
                grads = self.kernels.pooled_conv1x1_backward(grad, input, conv1, accumulator, self.shape)
            else:
                complete = identity_backward(grad, grad, self.statistics.dtype)
                grads = self.kernels.conv1x1_backward(complete, input, conv1, accumulator)
        if needs_grad.conv_bias:
            self.grads[self.plan.consumer_tensors.stop - 1] = grad.sum(0, dtype=self.statistics.dtype)
        self._store(self.plan.consumer_tensors.start, norm, *grads)

    def _store(self, start: int, norm: BatchNormAffine, grad_conv: Tensor | None, *sums: Tensor) -> None:
        """Store the gradients of a norm and a convolution, and add their part of the statistics' gradient."""
        norm.set_gradients(*sums)
        self.statistics.add_gradients(norm)
        grads = [norm.grad_weight, norm.grad_bias, grad_conv]
        self.grads[start : start + len(grads)] = grads


def _own_norm(tensors: NormConv, saved: SavedNorm) -> BatchNormAffine:
    """A norm with statistics of its own."""
    assert saved.inv_std is not None
    return BatchNormAffine(tensors.norm_weight, tensors.norm_bias, saved.inv_std, saved.mean)
