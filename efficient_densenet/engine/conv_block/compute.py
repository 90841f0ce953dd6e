"""The forward and the backward of a dense block without norms; the package's docstring says what they do."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._tensors import CHANNELS_LAST, accumulation_dtype, as_dtype
from ...kernels import kernels_for
from ...kernels.activations import IDENTITY
from ...kernels.interface import AffineInput, BatchNormAffine, BatchNormBackward, Conv1x1, GradAccumulator, Kernels
from ...kernels.portable import to_pixel_matrix, to_spatial
from ..stage.spec import columns_of
from . import padded
from .spec import ConvBlockSpec, ConvSpec, ConvTensors, conv_tensors


class SavedBlock(NamedTuple):
    """The tensors that the backward reads: the features, and z of each layer whose y does not determine f'(z)."""

    features: Tensor
    values_before: Sequence[Tensor]
    parameters: Sequence[Tensor | None]


class _Convolutions:
    """The convolutions of a block as kernels take them, on features that are stored in one matrix."""

    def __init__(self, spec: ConvBlockSpec, features: Tensor, parameters: Sequence[Tensor | None]) -> None:
        self.spec, self.features = spec, features
        self.kernels: Kernels = kernels_for(features, activations=[IDENTITY.name])
        self.tensors = conv_tensors(parameters)
        weights = self.kernels.arranged_weights([as_dtype(each.weight, spec.torch_dtype) for each in self.tensors])
        self.weights = weights
        self.vectors = features.new_zeros(2, features.shape[1], dtype=accumulation_dtype(features.dtype))
        self.vectors[0] = 1

    def input(self, i: int) -> AffineInput:
        """What convolution i reads: the features as they are."""
        columns = self.spec.columns_read(i)
        ones, zeros = self.vectors[:, columns]
        return AffineInput(columns_of(self.features, columns), BatchNormAffine(ones, zeros, ones, None, True), IDENTITY)

    def forward(self, i: int, shape: torch.Size) -> Tensor:
        """The output of convolution i with its bias, (pixels, out_channels)."""
        conv, input, weight, bias = self.spec.convolutions[i], self.input(i), self.weights[i], self.tensors[i].bias
        if conv.kernel_size == 1:
            output = weight.new_empty(len(self.features), conv.out_channels)
            self.kernels.conv1x1_forward(Conv1x1(input, weight.flatten(1), output))
        elif conv.padding_mode != "zeros":
            output = padded.conv3x3_forward(input.values, weight, shape, conv.dilation, conv.padding_mode)
        else:
            output = self.kernels.conv3x3_forward(input, weight, shape, conv.dilation)
        return output if bias is None else output.add_(as_dtype(bias, output.dtype))

    def backward(self, i: int, grad: Tensor, shape: torch.Size, accumulator: GradAccumulator) -> Tensor | None:
        """Accumulate the gradient of what convolution i has read; returns the gradient of its weight."""
        conv, input, weight = self.spec.convolutions[i], self.input(i), self.weights[i]
        if conv.padding_mode != "zeros":
            settings = shape, conv.dilation, conv.padding_mode
            return padded.conv3x3_backward(grad, input.values, weight, accumulator, *settings)
        if conv.kernel_size == 1:
            backward = BatchNormBackward(grad, grad)
            grads = self.kernels.conv1x1_backward(backward, input, weight.flatten(1), accumulator)
        else:
            grads = self.kernels.conv3x3_backward(grad, input, weight, accumulator, shape, conv.dilation)
        return None if grads.conv_weight is None else grads.conv_weight.view_as(weight)


def forward(spec: ConvBlockSpec, x: Tensor, parameters: Sequence[Tensor | None]) -> list[Tensor]:
    """The outputs, then the features and the values of `SavedBlock`."""
    shape = torch.Size([x.shape[0], *x.shape[2:]])
    features = x.new_empty(shape.numel(), spec.order.total, dtype=spec.torch_dtype)
    convolutions, values_before = _Convolutions(spec, features, parameters), []
    to_spatial(columns_of(features, spec.columns_read(0)), shape).copy_(x)
    for i, layer in enumerate(spec.layers):
        z = convolutions.forward(i, shape)
        if not layer.activation.is_known_from_output:
            values_before.append(z)
        y = layer.activation.forward(z)
        columns_of(features, spec.columns_written(i)).copy_(y)
    outputs = []
    if spec.last is not None:
        output = convolutions.forward(len(spec.layers), shape)
        images = to_spatial(output, shape)
        outputs.append(empty_images(x, images.shape[1], spec.last_channels_last, images.dtype).copy_(images))
    if spec.returns_features:
        outputs.append(_features_as_images(spec, features, shape, x))
    return [*outputs, features, *values_before]


def empty_images(x: Tensor, channels: int, channels_last: bool, dtype: torch.dtype) -> Tensor:
    """Uninitialized images of as many pixels as x has."""
    memory_format = CHANNELS_LAST[x.dim()] if channels_last else torch.contiguous_format
    size = x.shape[0], channels, *x.shape[2:]
    return torch.empty(size, dtype=dtype, device=x.device, memory_format=memory_format)


def empty_features(spec: ConvBlockSpec, x: Tensor) -> Tensor:
    """Uninitialized images for the features that the block returns, in the dtype of plain's concatenation."""
    columns, dtype = spec.columns_returned, spec.torch_dtype
    dtype = dtype if spec.new_features_only else torch.promote_types(x.dtype, dtype)
    return empty_images(x, columns.stop - columns.start, spec.channels_last, dtype)


def _features_as_images(spec: ConvBlockSpec, features: Tensor, shape: torch.Size, x: Tensor) -> Tensor:
    """A copy of the features, with the input as it was."""
    images = empty_features(spec, x).copy_(to_spatial(columns_of(features, spec.columns_returned), shape))
    if images.dtype is not features.dtype:
        images[:, spec.columns_read(0)] = x
    return images


class Backward:
    """One backward of a block. `needs_grad` is for the block's input, then for each of its parameters."""

    def __init__(self, spec: ConvBlockSpec, shape: torch.Size, saved: SavedBlock, needs_grad: Sequence[bool]) -> None:
        self.spec, self.shape, self.saved = spec, shape, saved
        self.convolutions = _Convolutions(spec, saved.features, saved.parameters)
        self.needs_grad_input, *needs_grads = needs_grad
        self.needs_grads = conv_tensors(needs_grads)
        self.values_before = list(saved.values_before)
        self.grads: list[ConvTensors] = []
        self.grad_accum = torch.empty_like(saved.features)

    def run(self, grad_last: Tensor | None, grad_features: Tensor | None) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of the block's input and of its parameters; None where a gradient is not needed."""
        if grad_features is not None:
            self._features(grad_features)
        elif grad_last is None:
            self.grad_accum.zero_()
        if self.spec.last is not None:
            self._last(grad_last, overwrite=grad_features is None)
        for i in reversed(range(len(self.spec.layers))):
            self._layer(i, self.spec.layers[i])
        grads = [grad for grads in reversed(self.grads) for grad in grads]
        if not self.needs_grad_input:
            return None, grads
        grad_input = columns_of(self.grad_accum, self.spec.columns_read(0)).contiguous()
        return to_spatial(grad_input, self.shape), grads

    def _features(self, grad_output: Tensor) -> None:
        if self.spec.new_features_only:
            columns_of(self.grad_accum, self.spec.columns_read(0)).zero_()
        to_spatial(columns_of(self.grad_accum, self.spec.columns_returned), self.shape).copy_(grad_output)

    def _last(self, grad_output: Tensor | None, overwrite: bool) -> None:
        if grad_output is None:
            self.grads.append(ConvTensors._make([None] * len(ConvTensors._fields)))
        else:
            grad = as_dtype(to_pixel_matrix(grad_output), self.spec.torch_dtype)
            self._convolution(len(self.spec.layers), grad, overwrite)

    def _layer(self, i: int, layer: ConvSpec) -> None:
        columns, activation = self.spec.columns_written(i), layer.activation
        grad = columns_of(self.grad_accum, columns)
        if layer.activation.is_known_from_output:
            grad = activation.backward_from_output(grad, columns_of(self.saved.features, columns))
        else:
            grad = activation.backward(grad, self.values_before.pop())
        self._convolution(i, grad.contiguous())

    def _convolution(self, i: int, grad: Tensor, overwrite: bool = False) -> None:
        """The gradients of convolution i, from the gradient of its output."""
        tensors, needs = self.convolutions.tensors[i], self.needs_grads[i]
        grad_accum = columns_of(self.grad_accum, self.spec.columns_read(i))
        grad_weight = grad_bias = None
        if self._is_needed_before(i) or needs.weight:
            accumulator = GradAccumulator(grad_accum, overwrite, bool(needs.weight))
            grad_weight = self.convolutions.backward(i, grad, self.shape, accumulator)
        if needs.bias:
            grad_bias = grad.sum(0, dtype=accumulation_dtype(grad.dtype))
        self.grads.append(ConvTensors._make(map(_in_dtype_of, (grad_weight, grad_bias), tensors)))

    def _is_needed_before(self, i: int) -> bool:
        """Whether the input, or a parameter of a convolution before convolution i, needs a gradient."""
        return self.needs_grad_input or any(any(needs) for needs in self.needs_grads[:i])


def _in_dtype_of(grad: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    return None if grad is None or tensor is None else as_dtype(grad, tensor.dtype)
