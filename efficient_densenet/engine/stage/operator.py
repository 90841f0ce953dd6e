"""A stage as PyTorch operators, `efficient_densenet::stage` and `::stage_backward`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._tensors import accumulation_dtype
from ...kernels.portable import to_spatial
from ..operator import BackwardInputs, EngineNode, Operator
from .backward import Backward
from .forward import Forward, StageInputs
from .second_order import PlainStage
from .spec import PER_NORM, SavedStage, StageSpec, decode, norm_convs


class SharedStage(EngineNode):
    """A stage in autograd's graph."""


class StageOperator(Operator):
    name = "stage"
    inputs_schema = "Tensor[] running_statistics, Tensor[] dropout_masks, Tensor[] stored, Tensor[] skipped,"
    saved_schema = (
        "Tensor features, Tensor statistics, Tensor? count, Tensor? codes, Tensor[] bottlenecks, "
        "Tensor[] dropout_masks,"
    )
    inputs_type, saved_type, node = StageInputs, SavedStage, SharedStage
    decode = staticmethod(decode)

    def compute(self, spec: StageSpec, inputs: StageInputs) -> list[Tensor]:
        forward = Forward(spec, inputs)
        outputs = forward.run()
        return [*outputs, *forward.computed()]

    def written(self, spec: StageSpec, inputs: StageInputs) -> Sequence[Tensor]:
        return inputs.stored[:1] if spec.skip else ()

    def to_save(self, spec: StageSpec, inputs: StageInputs, computed: Sequence[Tensor]) -> SavedStage:
        features, statistics, *rest = *inputs.stored, *computed
        count = rest.pop(0) if spec.has_count else None
        codes = rest.pop(0) if spec.consumer is not None and spec.consumer.max_pools else None
        masks = inputs.dropout_masks[: spec.num_masks]
        return SavedStage(features, statistics, count, codes, rest, masks, inputs.parameters)

    def gradients(self, spec: StageSpec, inputs: BackwardInputs) -> Sequence[Tensor | None]:
        return Backward(spec, inputs).run()

    def needed(self, spec: StageSpec, inputs: BackwardInputs) -> Sequence[bool]:
        """Parameters of a consumer whose output is not in the loss get no gradients."""
        if spec.consumer is None or inputs.grad_outputs[0] is not None:
            return inputs.needs_grad
        start = 1 + spec.consumer_norm * PER_NORM
        return [needed and i < start for i, needed in enumerate(inputs.needs_grad)]

    def input_values(self, spec: StageSpec, shape: torch.Size, saved: SavedStage) -> Tensor:
        """From the features, whose first channels they are."""
        return to_spatial(spec.values(saved.features, saved.statistics, spec.segment_columns(0)), shape)

    def plain(self, spec: StageSpec, saved: SavedStage, x: Tensor, *parameters: Tensor | None) -> list[Tensor]:
        return PlainStage(spec, saved, parameters).run(x)

    def fake_results(self, spec: StageSpec, inputs: StageInputs) -> list[Tensor]:
        x = inputs.x
        shape, dtype = (x.shape[0], *x.shape[2:]), accumulation_dtype(x.dtype)
        pixels, outputs = math.prod(shape), []
        if spec.consumer is not None:
            weight, sides, dtype_of_output = norm_convs(inputs.parameters)[-1].conv_weight, x.shape[2:], x.dtype
            channels = spec.order.total
            if weight is not None:
                dtype_of_output, channels = spec.torch_dtype, weight.shape[0]
            if spec.consumer.pools or spec.consumer.max_pools:
                sides = [side // 2 for side in sides]
            size, memory_format = (x.shape[0], channels, *sides), spec.consumer_memory_format(x)
            outputs.append(torch.empty(size, dtype=dtype_of_output, device=x.device, memory_format=memory_format))
        if spec.room:
            outputs.append(x.new_empty(()).expand(pixels, spec.num_output_channels))
        elif spec.returns_features:
            outputs.append(spec.empty_images(x, spec.num_output_channels, shape))
        columns = spec.order.total + sum(spec.room)
        computed = [x.new_empty(pixels, columns), x.new_empty(3, spec.num_columns, dtype=dtype)]
        others = [x.new_empty((), dtype=dtype)] if spec.has_count else []
        if spec.consumer is not None and spec.consumer.max_pools:
            others.append(x.new_empty(x.shape[0] * math.prod(sides), channels, dtype=torch.uint8))
        bottlenecks = [
            x.new_empty(pixels, layer.width, dtype=spec.torch_dtype) for layer in spec.layers if layer.keep_bottleneck
        ]
        return [*outputs, *computed[len(inputs.stored) :], *others, *bottlenecks]

    def fake_grad_input(self, spec: StageSpec, shape: Sequence[int], saved: SavedStage) -> Tensor:
        matrix = saved.features.new_empty(saved.features.shape[0], spec.in_channels - spec.skip)
        return matrix.view(*shape, matrix.shape[1]).movedim(-1, 1)


STAGE = StageOperator().register()
