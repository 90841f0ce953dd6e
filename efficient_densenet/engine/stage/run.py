"""Runs a stage: reads its specification from the modules of a block and its consumer, and updates their running
statistics."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._compilers import specialized
from ..._tensors import CHANNELS_LAST, as_dtype, compute_dtype, device_type, memory_format_of
from ...kernels.average_pooling import average_pool_dtype
from ...norms.frozen import eps_of, uses_running_statistics
from ...norms.sync_batch_norm import sync_group
from ..operator import run_operator
from ..parts import BlockParts, ConsumerParts, LayerParts, activation_spec, weight_and_bias
from ..sharded import run_inside
from .block_features import remember_features, stored_features
from .forward import StageInputs
from .operator import STAGE
from .running_statistics import NormUpdate, update_running_statistics
from .spec import ConsumerSpec, LayerSpec, StageSpec, shared_spec


class StageFormats(NamedTuple):
    """The memory format that x and the outputs have in the plain network, and whether the consumer's output stays in
    channels_last, in which it is computed, since only another stage reads it."""

    plain: torch.memory_format
    keeps_channels_last: bool = False


def run(block: BlockParts, consumer: ConsumerParts | None, x: Tensor, formats: StageFormats | None = None) -> Tensor:
    """The output of a block, or of `consumer` (a transition or a norm) on the block's output."""

    def output(x: Tensor) -> Tensor:
        plan = StagePlan(block, consumer, x, formats=formats)
        return plan.finish(plan.apply(x, *plan.tensors)[0])

    return run_inside(block.sharded, output, x)


def run_with_features(block: BlockParts, consumer: ConsumerParts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of `consumer` on the output of a block, and the block's output."""

    def outputs(x: Tensor) -> tuple[Tensor, Tensor]:
        plan = StagePlan(block, consumer, x, return_features=True)
        output, features = plan.apply(x, *plan.tensors)
        return plan.finish(output), features

    return run_inside(block.sharded, outputs, x)


def run_consumer(consumer: ConsumerParts, x: Tensor) -> Tensor:
    """The output of `consumer` on x, which may be any tensor. A block's output is not stored again."""
    plan = StagePlan(BlockParts(()), consumer, x)
    return plan.finish(plan.apply(x, *plan.tensors, stored=stored_features(x, plan.spec))[0])


class StagePlan:
    """The modules of a stage, layers or a consumer or both, on one input.

    Attributes:
        spec: the settings of the modules.
        tensors: the parameters of the modules, four for each norm, as in `NormConv`.
        running_statistics: running_mean and running_var of each frozen norm.
        updates: the norms with batch statistics.
    """

    def __init__(
        self,
        block: BlockParts,
        consumer: ConsumerParts | None,
        x: Tensor,
        return_features: bool = False,
        formats: StageFormats | None = None,
    ) -> None:
        self.layers, self.consumer = block.layers, consumer
        self.spec = _read_spec(block, consumer, x, return_features, formats or StageFormats(memory_format_of(x)))
        self.tensors: list[Tensor | None] = []
        self.running_statistics: list[Tensor] = []
        self.updates: list[NormUpdate] = []
        units = [unit for layer in self.layers for unit in zip(layer.norms, layer.convolutions, strict=True)]
        units += [] if consumer is None else [(consumer.norm, consumer.conv)]
        bias = None
        for (norm, conv), columns, frozen in zip(units, self.spec.norm_columns, self.spec.norms_frozen, strict=True):
            weight, norm_bias = weight_and_bias(norm)
            if frozen:
                self.running_statistics += [norm.running_mean, norm.running_var]
            elif columns is None:
                self.updates.append(NormUpdate(norm, self.spec.order.slice(0, weight.shape[0])))
            else:
                self.updates.append(NormUpdate(norm, columns, bias))
            conv_weight, bias = (None, None) if conv is None else weight_and_bias(conv)
            self.tensors += [weight, norm_bias, conv_weight, bias]

    def apply(self, x: Tensor, *tensors: Tensor | None, stored: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """The consumer's output, the block's output, or both, with `tensors` as the plan's parameters.

        `stored` are features that a block has stored already, and their statistics.
        """
        inputs = StageInputs(x, tensors, self.running_statistics, self.dropout_masks(x), stored)
        results = run_operator(STAGE, self.spec, inputs)
        count = self.spec.num_outputs
        features, statistics, *_ = *stored, *results[count:]
        if not torch.compiler.is_compiling():
            remember_features(self.spec, results[0], features, statistics)
        if self.updates:
            update_running_statistics(self.updates, statistics)
        return tuple(results[:count])

    def dropout_masks(self, x: Tensor) -> list[Tensor]:
        """For each layer with dropout, a mask of the kept values. It is drawn by dropout of ones, in the shape and the
        memory format of the plain layer's output, so that the random numbers are the plain layer's."""
        size = x.shape[0], self.spec.growth_rate, *x.shape[2:]
        masks = []
        with torch.no_grad():
            for layer in self.layers:
                if layer.drop_rate:
                    memory_format = self._output_memory_format(layer, x)
                    ones = torch.empty(size, dtype=self.spec.torch_dtype, device=x.device, memory_format=memory_format)
                    masks.append(layer.dropout(ones.fill_(1), layer.drop_rate) != 0)
        return masks

    def _output_memory_format(self, layer: LayerParts, x: Tensor) -> torch.memory_format:
        """The format of the plain layer's output: channels_last if the input or the weight of its convolution is, but
        for volumes in float64 on a CPU, which oneDNN does not convolve."""
        if x.dim() == 5 and self.spec.torch_dtype is torch.float64 and device_type(x) == "cpu":
            return torch.contiguous_format
        weight_is_channels_last = x.dim() in CHANNELS_LAST and layer.last_conv.weight.stride(1) == 1
        return CHANNELS_LAST[x.dim()] if weight_is_channels_last else self.spec.memory_format(x)

    def finish(self, output: Tensor) -> Tensor:
        """Apply the operations after the consumer's convolution, such as another pooling, with ordinary autograd."""
        if self.consumer is None:
            return output
        if self.consumer.pools:
            output = as_dtype(output, average_pool_dtype(output))
        return output if self.consumer.after is None else self.consumer.after(output)


def _read_spec(
    block: BlockParts,
    consumer: ConsumerParts | None,
    x: Tensor,
    return_features: bool,
    formats: StageFormats,
) -> StageSpec:
    norm = consumer.norm if consumer is not None and not block.layers else block.layers[0].norm1
    group, has_format = sync_group(norm), x.dim() in CHANNELS_LAST
    keeps_channels_last = formats.keeps_channels_last and has_format and consumer is not None and consumer.after is None
    return shared_spec(
        dtype=str(compute_dtype(x)).removeprefix("torch."),
        channels_last=formats.plain is not torch.contiguous_format,
        keeps_channels_last=keeps_channels_last,
        in_channels=norm.weight.shape[0],
        growth_rate=int(block.layers[0].last_conv.out_channels) if block.layers else 0,
        newest_first=block.newest_first,
        new_features_only=block.new_features_only,
        return_features=return_features,
        frozen=uses_running_statistics(norm),
        eps=specialized(float(eps_of(norm))),
        sync_group=None if group is None else group.name,
        layers=tuple(map(_read_layer, block.layers)),
        consumer=None if consumer is None else _read_consumer(consumer),
    )


def _read_consumer(consumer: ConsumerParts) -> ConsumerSpec:
    return ConsumerSpec(consumer.conv is not None, consumer.pools, activation_spec(consumer.activation))


def _read_layer(layer: LayerParts) -> LayerSpec:
    """Python's numbers: modules accept NumPy's too, which are equal, but operators do not."""
    norm2, dilation, drop_rate = layer.norm2, int(layer.dilation), specialized(float(layer.drop_rate))
    activations = activation_spec(layer.activation(0)), activation_spec(layer.activation(1))
    if norm2 is None:
        return LayerSpec(0, dilation, drop_rate, False, False, 0.0, *activations)
    eps, keep_bottleneck = specialized(float(eps_of(norm2))), bool(layer.keep_bottleneck)
    width = int(layer.conv1.out_channels)
    return LayerSpec(width, dilation, drop_rate, keep_bottleneck, uses_running_statistics(norm2), eps, *activations)
