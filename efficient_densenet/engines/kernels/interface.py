"""The interface that every set of kernels implements, and the arguments of its kernels.

Layout: a pixel matrix is (pixels, channels), one row for each pixel of each image, as channels_last memory lies. It may
be a slice of the channels of a larger matrix: its row stride is then larger than its number of channels.
`shape` is (images, *spatial), so that pixels = shape.numel(). Vectors are (channels,), in the accumulation dtype:
float32 for half precisions, else the values' own.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class AffineInput(NamedTuple):
    """A convolution's input y = relu(scale · values + shift): a batch norm and its ReLU, applied on the fly.

    With mean μ, r = 1 / sqrt(var + eps) and the norm's parameters γ and β: scale = γ · r, shift = β − μ · scale.
    Where the values have their mean subtracted already, shift = β.
    """

    values: Tensor  # (pixels, channels)
    scale: Tensor  # (channels,)
    shift: Tensor  # (channels,)

    def tile(self, rows: slice) -> "AffineInput":
        return self._replace(values=self.values[rows])


class GradAccumulator(NamedTuple):
    """Where a backward kernel accumulates: grad_accum += grad_scale · grad, or `=` with `overwrite`.

    `needs_grad_weight` is False where the convolution's weight does not require a gradient: grad_weight is then None.
    """

    grad_scale: Tensor  # (channels,)
    grad_accum: Tensor  # (pixels, channels)
    overwrite: bool = False
    needs_grad_weight: bool = True

    def tile(self, rows: slice) -> "GradAccumulator":
        return self._replace(grad_accum=self.grad_accum[rows])


class Conv1x1(NamedTuple):
    """output = relu(scale · values + shift) @ weight.T"""

    input: AffineInput
    weight: Tensor  # (out_channels, in_channels)
    output: Tensor  # (pixels, out_channels), written by the kernel


class BatchNormBackward(NamedTuple):
    """grad_input = scale · values + shift + grad_scale · grad_accum: a batch norm's backward, its two sums being known.

    It is r · (g − mean(g) − x̂ · mean(g · x̂)), with the terms in x and the constant ones collected in `input`:
    grad_scale = r, scale = −r² · mean(g · x̂), shift = −r · mean(g) for values x − μ. Only the fields of the two are
    borrowed: no ReLU is applied, and `accumulator.grad_accum` is read, not written.
    """

    input: AffineInput
    accumulator: GradAccumulator


Statistics = tuple[Tensor, Tensor]
"""Mean and biased variance of each channel, (channels,) each."""

NormSums = tuple[Tensor, Tensor]
"""Σ grad and Σ grad · values over the rows, grad being the gradient masked by any ReLU: (channels,) each."""

ConvGradients = tuple[Tensor | None, Tensor, Tensor]
"""grad_weight (None where it is not needed), and the two sums of `NormSums`."""


class Kernels(Protocol):
    """A set of kernels. Modules implement it: `portable`, `numba_cpu.operations`, `triton_gpu.operations`.

    `*_forward` reads an `AffineInput` y. `*_backward` computes g, the gradient of y, masks it by the ReLU,
    accumulates it in `accumulator`, and returns grad_weight and the two sums for the norm's own gradients.
    `portable` shows each of them in a few lines of PyTorch.
    """

    def batch_statistics(self, values: Tensor) -> Statistics:
        """Mean and biased variance over the rows of values, (pixels, channels)."""
        ...

    def batch_norm_grad_input(self, grad: BatchNormBackward) -> Tensor:
        """r · (g − mean(g) − x̂ · mean(g · x̂)), (pixels, channels), contiguous."""
        ...

    def affine_forward(self, input: AffineInput) -> Tensor:
        """scale · values + shift without ReLU, (pixels, channels): a norm whose output leaves the stage."""
        ...

    def affine_backward(self, grad_output: Tensor, input: AffineInput, accumulator: GradAccumulator) -> NormSums:
        """The backward of `affine_forward`, with g = grad_output."""
        ...

    def conv1x1_forward(self, conv: Conv1x1) -> None:
        """Writes conv.output."""
        ...

    def conv1x1_forward_with_statistics(self, conv: Conv1x1) -> Statistics:
        """Writes conv.output and returns its statistics."""
        ...

    def conv1x1_backward(
        self,
        grad_output: BatchNormBackward,
        input: AffineInput,
        weight: Tensor,
        accumulator: GradAccumulator,
        next_bottleneck: Conv1x1 | None = None,
    ) -> ConvGradients:
        """g = grad_output @ weight, grad_weight = grad_output.T @ y, with grad_output computed on the fly.

        Also computes `next_bottleneck`, the bottleneck of the layer that the backward walks to next, while a tile of
        the features is in cache: it reads some of the same channels, and its output may be the memory of
        `grad_output.input.values`.
        """
        ...

    def conv3x3_forward(self, input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1) -> Tensor:
        """A 3×3 convolution (3 or 3×3×3 in other dimensions) of y with padding = dilation: (pixels, out_channels)."""
        ...

    def conv3x3_forward_with_statistics(
        self, input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output of `conv3x3_forward`, and its statistics."""
        ...

    def conv3x3_backward(
        self,
        grad_output: Tensor,
        input: AffineInput,
        weight: Tensor,
        accumulator: GradAccumulator,
        shape: torch.Size,
        dilation: int = 1,
    ) -> ConvGradients:
        """The backward of `conv3x3_forward`, given grad_output (pixels, out_channels)."""
        ...

    def pooled_conv1x1_forward(self, input: AffineInput, weight: Tensor, shape: torch.Size) -> Tensor:
        """average_pool(y @ weight.T) over 2×2 pixels, computed as average_pool(y) @ weight.T: a quarter of the work.

        (pooled pixels, out_channels); pixels at the edge of an odd size are in no window, as in PyTorch.
        """
        ...

    def pooled_conv1x1_backward(
        self,
        grad_output: Tensor,
        input: AffineInput,
        weight: Tensor,
        accumulator: GradAccumulator,
        shape: torch.Size,
    ) -> ConvGradients:
        """The backward of `pooled_conv1x1_forward`, given grad_output (pooled pixels, out_channels)."""
        ...
