"""The stem as PyTorch operators, `efficient_densenet::stem` and `::stem_backward`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._tensors import memory_format_of
from ...kernels.interface import Gradients
from ...norms.sync_batch_norm import SyncGroup
from ..operator import BackwardInputs, EngineNode, Operator
from ..stage.second_order import plain_norm
from .forward import Convolved, forward
from .spec import StemSpec, decode


class StemInputs(NamedTuple):
    """The tensors that a stem reads: x, the weight and the bias of the norm and of the convolution, and the running
    mean and variance of a frozen norm."""

    x: Tensor
    parameters: Sequence[Any]
    running_statistics: Sequence[Tensor] = ()


class SavedStem(NamedTuple):
    """The tensors that the backward of a stem reads. `count` is the number of values per channel in a sync group."""

    x: Tensor
    statistics: Tensor
    count: Tensor | None
    parameters: Sequence[Any]


class SharedStem(EngineNode):
    """A stem in autograd's graph."""


class StemOperator(Operator):
    name = "stem"
    inputs_schema, saved_schema = "Tensor[] running_statistics,", "Tensor x, Tensor statistics, Tensor? count,"
    inputs_type, saved_type, node = StemInputs, SavedStem, SharedStem
    decode = staticmethod(decode)

    def compute(self, spec: StemSpec, inputs: StemInputs) -> list[Tensor]:
        norm_weight, norm_bias, weight, bias = inputs.parameters
        return forward(Convolved(spec, inputs.x, weight, bias), norm_weight, norm_bias, inputs.running_statistics)

    def to_save(self, spec: StemSpec, inputs: StemInputs, computed: Sequence[Tensor]) -> SavedStem:
        statistics, *count = computed
        return SavedStem(inputs.x, statistics, count[0] if count else None, inputs.parameters)

    def gradients(self, spec: StemSpec, inputs: BackwardInputs) -> Sequence[Tensor | None]:
        """By the formulas in the package's docstring. The gradient of the convolution's output is written over it."""
        (grad_output,), _, saved, needs_grad = inputs
        norm_weight, norm_bias, weight, bias = saved.parameters
        assert grad_output is not None  # or there would be no backward
        convolved = Convolved(spec, saved.x, weight, bias)
        input = convolved.norm_input(norm_weight, norm_bias, saved.statistics)
        values, kernels, norm = convolved.values, convolved.kernels, input.norm
        grad_output = grad_output.contiguous(memory_format=memory_format_of(values))  # once, for both kernels
        indices, grads = kernels.norm_activation_max_pool_reduce(grad_output, input, spec.pool)
        needs_grad_input, _, _, needs_grad_weight, needs_grad_bias = needs_grad
        grad_input, grad_weight = None, None
        if needs_grad_input or needs_grad_weight:
            sums, count = grads, convolved.count
            group = SyncGroup.named(spec.sync_group)
            if group is not None and saved.count is not None:  # the sums over all processes, divided by their count
                totals = group.sums(grads.norm_weight, grads.norm_bias)
                sums, count = Gradients(*(total / saved.count for total in totals)), 1
            kernels.norm_activation_max_pool_backward(grad_output, indices, input, spec.pool, sums, count)
            grad_input, grad_weight = convolved.gradients(needs_grad_input, needs_grad_weight)
        if grad_input is not None:  # with the strides of `empty_like(x)`, which the fake implementation returns
            same_strides = grad_input.stride() == torch.empty_like(saved.x, device="meta").stride()
            grad_input = grad_input.to(saved.x.dtype) if same_strides else torch.empty_like(saved.x).copy_(grad_input)
        grad_bias = norm.grad_conv_bias(grads.norm_bias) if needs_grad_bias else None
        return [grad_input, grads.norm_weight, grads.norm_bias, grad_weight, grad_bias]

    def input_values(self, spec: StemSpec, shape: torch.Size, saved: SavedStem) -> Tensor:
        return saved.x

    def plain(self, spec: StemSpec, saved: SavedStem, x: Tensor, *parameters: Any) -> list[Tensor]:
        (norm_weight, norm_bias, weight, bias), dtype = parameters, spec.torch_dtype
        x = spec.conv.forward(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        x = plain_norm(x, norm_weight, norm_bias, spec.eps, saved.statistics if spec.frozen else None)
        x = spec.activation.forward(x)
        return [spec.pool.forward(x)[0].to(getattr(torch, spec.output_dtype))]

    def fake_results(self, spec: StemSpec, inputs: StemInputs) -> list[Tensor]:
        (_, _, weight, bias), x, dtype = inputs.parameters, inputs.x, spec.torch_dtype
        # The memory format of a convolution's output depends on the device's routine, so a fake convolution is run.
        convolved = spec.conv.forward(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        pooled, dtype = spec.pool.forward(convolved)[0].shape, getattr(torch, spec.output_dtype)
        output = torch.empty(pooled, dtype=dtype, device=x.device, memory_format=memory_format_of(convolved))
        statistics = x.new_empty(3, weight.shape[0], dtype=spec.accumulation_dtype)
        return [output, statistics, *([statistics.new_empty(())] if spec.has_count else [])]

    def fake_grad_input(self, spec: StemSpec, shape: Sequence[int], saved: SavedStem) -> Tensor:
        return torch.empty_like(saved.x)


STEM = StemOperator().register()
