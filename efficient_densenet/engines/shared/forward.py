"""The forward of a stage: every layer reads the features so far in place and writes its new channels beside them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import kernels_for, scratch
from ..kernels.interface import AffineInput, Conv1x1, Statistics
from ..kernels.portable import halved, to_pixel_matrix, to_spatial
from ..parts import ConsumerParts, LayerParts, Norm
from .batch_norm import (
    BatchNormAffine,
    running_statistics,
    synchronized_statistics,
    unbiased_variance,
    update_running_statistics,
)
from .plan import NormConv, StagePlan, norm_convs
from .saved import SavedLayer, SavedNorm, SavedStage
from .statistics import SharedStatistics


class Forward:
    """One forward of a stage; `tensors` are the values of the plan's parameters.

    `stored` has the features of x and their statistics, if a block before the stage has stored them.
    """

    def __init__(
        self, plan: StagePlan, x: Tensor, tensors: Sequence[Tensor | None], stored: SharedStatistics | None = None
    ) -> None:
        self.plan, self.tensors, self.x = plan, tensors, x
        self.shape = torch.Size([x.shape[0], *x.shape[2:]])
        self.is_stored = stored is not None
        self.statistics = stored or self._new_statistics()
        features = self.statistics.features
        self.kernels = kernels_for(features)
        self.saved = SavedStage(features, self.statistics.inv_std, [SavedLayer() for _ in plan.layers])
        returns_features = plan.return_features or plan.consumer is None
        output_channels = plan.output_order.total - plan.output_order.first
        self.block_output = self._empty_images(output_channels) if returns_features else None

    def run(self) -> tuple[Tensor, ...]:
        """The consumer's output, the block's, or both."""
        num_channels = self.x.shape[1] if self.is_stored else self._write(0, to_pixel_matrix(self.x))
        for i in range(len(self.plan.layers)):
            num_channels = self._write(num_channels, *self._layer(i))
        outputs = [] if self.plan.consumer is None else [self._consumer(self.plan.consumer)]
        return tuple(outputs if self.block_output is None else [*outputs, self.block_output])

    def _new_statistics(self) -> SharedStatistics:
        """Memory for the features, and for their statistics."""
        plan = self.plan
        features = self.x.new_empty(self.shape.numel(), plan.order.total)
        return SharedStatistics(features, plan.order, plan.frozen, plan.eps, plan.sync_group)

    def _empty_images(self, channels: int) -> Tensor:
        shape = self.shape[0], channels, *self.shape[1:]
        return torch.empty(shape, dtype=self.x.dtype, device=self.x.device, memory_format=self.plan.memory_format)

    def _write(
        self, start: int, values: Tensor, statistics: Statistics | None = None, bias: Tensor | None = None
    ) -> int:
        """Store new channels, values + bias; `statistics` are of the values, where a kernel has computed them."""
        stop = start + values.shape[1]
        self.statistics.write(values, self.plan.order.slice(start, stop), statistics, bias)
        if self.block_output is not None and start >= self.plan.output_order.first:
            output = values if bias is None else values + bias
            self.block_output[:, self.plan.output_order.slice(start, stop)] = to_spatial(output, self.shape)
        return stop

    def _norm(self, norm: Norm, tensors: NormConv, saved: SavedNorm) -> AffineInput:
        """What the convolution after a norm of the features reads."""
        if not self.plan.frozen:
            self.statistics.update_running_statistics(norm)
            return self.statistics.input(self.statistics.affine(tensors.norm_weight, tensors.norm_bias))
        saved.mean, saved.inv_std = running_statistics(norm, self.statistics.dtype)
        return self.statistics.input(BatchNormAffine(tensors.norm_weight, tensors.norm_bias, saved.inv_std, saved.mean))

    def _layer(self, i: int) -> tuple[Tensor, Statistics | None, Tensor | None]:
        """A layer's output, its batch mean and variance where nothing but a bias changes it any more, and that bias."""
        layer, saved = self.plan.layers[i], self.saved.layers[i]
        first, *second = norm_convs(self.tensors, self.plan.layer_tensors[i])
        input, last = self._norm(layer.norm1, first, saved.norm1), second[0] if second else first
        if second:
            input = self._bottleneck(i, input, first, last)
        arguments = input, last.conv_weight.to(self.plan.dtype), self.shape, layer.dilation
        if not self.plan.frozen and not layer.drop_rate:
            output, mean, variance = self.kernels.conv3x3_forward_with_statistics(*arguments)
            return output, (mean, variance), last.conv_bias
        output = self.kernels.conv3x3_forward(*arguments)
        if not layer.drop_rate:
            return output, None, last.conv_bias
        output = output if last.conv_bias is None else output.add_(last.conv_bias)
        noise = self._dropout_noise(output, layer)
        saved.dropout_mask = noise != 0
        output *= noise
        return output, None, None

    def _bottleneck(self, i: int, input: AffineInput, first: NormConv, second: NormConv) -> AffineInput:
        """What the 3×3 convolution reads.

        The bias of the first convolution is not added to its output, but to the mean that the norm subtracts.
        """
        norm, keep, saved = self.plan.layers[i].norm2, self.plan.layers[i].keep_bottleneck, self.saved.layers[i]
        assert norm is not None  # the layer has a bottleneck
        conv, bias = bottleneck_conv(input, first.conv_weight.to(self.plan.dtype).flatten(1), keep), first.conv_bias
        if self.plan.bottleneck_frozen[i]:
            self.kernels.conv1x1_forward(conv)
            mean, inv_std = running_statistics(norm, self.statistics.dtype)
            mean = mean if bias is None else mean - bias
        else:
            own = self.kernels.conv1x1_forward_with_statistics(conv)
            mean, variance, count = synchronized_statistics(*own, input.values.shape[0], self.plan.sync_group)
            biased_mean = mean if bias is None else mean + bias
            update_running_statistics(norm, biased_mean, unbiased_variance(variance, count))
            inv_std = torch.rsqrt(variance + norm.eps)
        saved.norm2 = SavedNorm(mean, inv_std)
        if keep:
            saved.bottleneck = conv.output
        return BatchNormAffine(second.norm_weight, second.norm_bias, inv_std, mean).input(conv.output)

    def _dropout_noise(self, output: Tensor, layer: LayerParts) -> Tensor:
        """Dropout of ones in the plain layer's shape, so that the random stream is the plain layer's."""
        ones = self._empty_images(output.shape[1]).to(output.dtype).fill_(1)
        return to_pixel_matrix(layer.dropout(ones, layer.drop_rate))

    def _consumer(self, consumer: ConsumerParts) -> Tensor:
        (tensors,) = norm_convs(self.tensors, self.plan.consumer_tensors)
        input, shape = self._norm(consumer.norm, tensors, self.saved.consumer_norm), self.shape
        if tensors.conv_weight is None:
            output = self.kernels.affine_forward(input)
        elif consumer.pools:
            conv = tensors.conv_weight.flatten(1).to(self.plan.dtype)
            output, shape = self.kernels.pooled_conv1x1_forward(input, conv, self.shape), halved(self.shape)
        else:
            conv1x1 = bottleneck_conv(input, tensors.conv_weight.flatten(1).to(self.plan.dtype), keep=True)
            self.kernels.conv1x1_forward(conv1x1)
            output = conv1x1.output
        if tensors.conv_bias is not None:
            output.add_(tensors.conv_bias)
        output = to_spatial(output, shape).contiguous(memory_format=self.plan.memory_format)
        return output.detach()  # a view could not be written into by the caller


def bottleneck_conv(input: AffineInput, weight: Tensor, keep: bool = False) -> Conv1x1:
    """The 1×1 convolution of `input`, to be computed into scratch, or into memory of its own to `keep` the output."""
    shape = input.values.shape[0], weight.shape[0]
    output = weight.new_empty(shape) if keep else scratch.take("bottleneck", shape, weight.dtype, weight.device)
    return Conv1x1(input, weight, output)
