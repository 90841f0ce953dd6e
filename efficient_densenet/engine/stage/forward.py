"""The forward of a stage: each layer reads features in place, and writes its new channels into the same matrix."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch_private import foreach_copy_
from ...kernels import kernels_for
from ...kernels.activations import ActivationSpec
from ...kernels.interface import AffineInput, Conv1x1, ImageConv, Kernels, StatisticsOutput
from ...kernels.portable import halved, to_pixel_matrix, to_spatial
from .masks import bits, drop_
from .max_pooled import MaxPooled
from .spec import PER_NORM, ConsumerSpec, LayerSpec, NormConv, StageSpec, norm_convs
from .statistics import ForwardStatistics


class StageInputs(NamedTuple):
    """The tensors that a stage reads.

    Attributes:
        x: the stage's input.
        parameters: four for each norm, as in `NormConv`, then the place of skipped channels in autograd's graph.
        running_statistics: running_mean and running_var of each frozen norm.
        dropout_masks: what dropout keeps of (pixels, channels): bits of the layers' outputs, bytes of the consumer's.
        stored: x as the features of an earlier stage and, unless the norms are frozen, their statistics; or features in
            which the skipped channels are stored; else empty.
        skipped: the statistics of the skipped channels, unless the norms are frozen.
    """

    x: Tensor
    parameters: Sequence[Tensor | None]
    running_statistics: Sequence[Tensor] = ()
    dropout_masks: Sequence[Tensor] = ()
    stored: Sequence[Tensor] = ()
    skipped: Sequence[Tensor] = ()


class Forward:
    """One forward of a stage."""

    def __init__(self, spec: StageSpec, inputs: StageInputs) -> None:
        self.spec, self.inputs, self.x = spec, inputs, inputs.x
        self.shape = torch.Size([self.x.shape[0], *self.x.shape[2:]])
        spec.check_shapes(inputs.parameters, self.x.dim() - 2)
        columns = spec.order.total + sum(spec.room)
        self.features = inputs.stored[0] if inputs.stored else self.x.new_empty(self.shape.numel(), columns)
        features = spec.own(self.features)
        self.kernels = kernels_for(features, spec.activations)
        self.statistics = ForwardStatistics(spec, self.kernels, features, *inputs.stored[1:])
        if inputs.skipped:
            self.statistics.copy_skipped(*inputs.skipped)
        self.tensors = norm_convs(converted_weights(inputs.parameters, spec.torch_dtype, self.kernels))
        self.running = iter(inputs.running_statistics)
        self.bottlenecks: list[Tensor] = []
        self.bottleneck: Tensor | None = None
        self.codes: Tensor | None = None
        self.block_output: Tensor | None = None
        if spec.returns_features and not spec.room:
            self.block_output = spec.empty_images(self.x, spec.num_output_channels, self.shape)

    def run(self) -> tuple[Tensor, ...]:
        """The consumer's output, the block's output, or both."""
        if self.spec.skip or not self.inputs.stored:
            self._write(0, to_pixel_matrix(self.x))
        for i in range(len(self.spec.layers)):
            self._write(i + 1, *self._layer(i))
        self.bottleneck = None
        outputs = [] if self.spec.consumer is None else [self._consumer(self.spec.consumer)]
        if self.spec.room:
            outputs.append(self.x.new_empty(()).expand(self.shape.numel(), self.spec.num_output_channels))
        return tuple(outputs if self.block_output is None else [*outputs, self.block_output])

    def computed(self) -> list[Tensor]:
        """The tensors computed for the backward, in the order of `SavedStage`, without `StageInputs.stored`."""
        computed = [self.features, self.statistics.finish()][len(self.inputs.stored) :]
        count = self.statistics.count
        others = [each for each in (count, self.codes) if isinstance(each, Tensor)]
        return [*computed, *others, *self.bottlenecks]

    def _write(
        self, segment: int, values: Tensor, statistics: StatisticsOutput | None = None, bias: Tensor | None = None
    ) -> None:
        """Store new channels, values + bias; `statistics` are of the values, where a kernel has computed them."""
        self.statistics.write(values, segment, statistics, bias)
        if self.block_output is not None and (segment > 0 or not self.spec.new_features_only):
            output = values if bias is None else values + bias
            columns = self.spec.output_order.slice(*self.spec.channels_of(segment))
            self.block_output[:, columns].copy_(to_spatial(output, self.shape))

    def _input(self, number: int, activation: ActivationSpec) -> AffineInput:
        """The input of the convolution after norm `number`, a norm of the features, and its activation."""
        if self.spec.frozen:
            self.statistics.copy_running(number, self.spec.eps, self.running)
        return self.statistics.input(number, self.tensors[number], activation)

    def _layer(self, i: int) -> tuple[Tensor, StatisticsOutput | None, Tensor | None]:
        """A layer's output, its statistics if a kernel has computed them, and the bias that `_write` is to add."""
        layer, norms = self.spec.layers[i], self.spec.layer_norms[i]
        last, input = self.tensors[norms.stop - 1], self._input(norms.start, layer.activation1)
        if layer.width:
            input = self._bottleneck(layer, norms.start, input)
        conv = ImageConv(input, last.conv_weight, self.shape, layer.dilation)
        if not self.spec.frozen and not layer.drop_rate:
            statistics = self.statistics.output(self.spec.segment_columns(i + 1), self.spec.eps)
            output = self.kernels.conv3x3_forward(conv, statistics)
            return output, statistics, last.conv_bias
        output = self.kernels.conv3x3_forward(conv)
        if not layer.drop_rate:
            return output, None, last.conv_bias
        output = output if last.conv_bias is None else output.add_(last.conv_bias)
        mask, bit = bits(self.inputs.dropout_masks, i)
        return drop_(output, mask, layer.drop_rate, bit), None, None

    def _bottleneck(self, layer: LayerSpec, number: int, input: AffineInput) -> AffineInput:
        """The input of the 3×3 convolution. `input` is the input of the 1×1 convolution, after norm `number`.

        The bias of the 1×1 convolution is neither added to its output nor included in the mean that the next norm
        subtracts.
        """
        first, second = self.tensors[number], self.tensors[number + 1]
        weight, memory, self.bottleneck = first.conv_weight.flatten(1), self.bottleneck, None
        if memory is None or memory.shape[1] != len(weight) or layer.keep_bottleneck:
            memory = None  # freed before another is allocated
            memory = weight.new_empty(len(input.values), len(weight))
        conv = Conv1x1(input, weight, memory)
        if layer.keep_bottleneck:
            self.bottlenecks.append(memory)
        else:
            self.bottleneck = memory
        if layer.norm2_frozen:
            self.kernels.conv1x1_forward(conv)
            self.statistics.copy_running(number + 1, layer.norm2_eps, self.running, first.conv_bias)
        else:
            statistics = self.statistics.output(self.spec.norms[number + 1].columns, layer.norm2_eps)
            self.kernels.conv1x1_forward(conv, statistics)
            self.statistics.synchronize(statistics)
        return AffineInput(conv.output, self.statistics.norm(number + 1, second), layer.activation2)

    def _consumer(self, consumer: ConsumerSpec) -> Tensor:
        number, shape = self.spec.consumer_norm, self.shape
        tensors = self.tensors[number]
        input = self._input(number, consumer.activation) if consumer.has_norm else None
        if input is None:
            output = self.statistics.product(tensors.conv_weight.flatten(1))
        elif not consumer.has_conv:
            output = self.kernels.affine_forward(input)
        elif consumer.pools:
            conv = ImageConv(input, tensors.conv_weight.flatten(1), self.shape)
            output, shape = self.kernels.pooled_conv1x1_forward(conv), halved(self.shape)
        elif consumer.max_pools:
            conv = ImageConv(input, tensors.conv_weight.flatten(1), self.shape)
            mask = self.inputs.dropout_masks[-1] if consumer.drop_rate else None
            pooled = MaxPooled(self.kernels, conv, consumer.drop_rate)
            output, self.codes = pooled.forward(tensors.conv_bias, mask)
            tensors, shape = tensors._replace(conv_bias=None), halved(self.shape)
        else:
            conv = conv1x1(input, tensors.conv_weight.flatten(1))
            self.kernels.conv1x1_forward(conv)
            output = conv.output
        if tensors.conv_bias is not None:
            output.add_(tensors.conv_bias)
        output = to_spatial(output, shape).contiguous(memory_format=self.spec.consumer_memory_format(self.x))
        return output.detach()  # the caller could not change a view in place


def converted_weights(parameters: Sequence[Tensor | None], dtype: torch.dtype, kernels: Kernels) -> list[Tensor | None]:
    """A stage's parameters, with the convolution weights converted to `dtype`, and those of 3×3 convolutions in the
    memory format that the kernels read.

    All weights are converted in one launch: on a GPU, a launch takes longer than converting one weight.
    """
    tensors, narrowed, weights = list(parameters), [], []
    weight_places = range(len(parameters))[NormConv._fields.index("conv_weight") :: PER_NORM]
    for place in weight_places:
        weight = tensors[place]
        if weight is not None and weight.dtype is not dtype:
            tensors[place] = torch.empty_like(weight, dtype=dtype)
            narrowed.append(tensors[place])
            weights.append(weight)
    if weights:
        foreach_copy_(narrowed, weights)
    with_taps = {
        place: weight for place in weight_places if (weight := tensors[place]) is not None and weight.shape[-1] == 3
    }
    arranged = kernels.arranged_weights(list(with_taps.values()))
    for place, weight in zip(with_taps, arranged, strict=True):
        tensors[place] = weight
    return tensors


def conv1x1(input: AffineInput, weight: Tensor) -> Conv1x1:
    """The 1×1 convolution of `input` into a new tensor."""
    return Conv1x1(input, weight, weight.new_empty(input.values.shape[0], weight.shape[0]))
