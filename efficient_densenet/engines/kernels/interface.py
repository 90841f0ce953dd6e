"""What every set of kernels implements, and the arguments that its kernels take.

A matrix here is (pixels, channels): one row for each pixel of each image, which is how channels_last memory lies.
`shape` is (images, *spatial). Vectors are (channels,), in the accumulation dtype: float32 for half precisions, else the
values' own. A stage's features exist once; what is as large as they are exists a tile of rows at a time.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class AffineInput(NamedTuple):
    """What a convolution reads: relu(scale · values + shift), a batch norm and its ReLU applied on the fly."""

    values: Tensor
    scale: Tensor
    shift: Tensor

    def tile(self, rows: slice) -> "AffineInput":
        return self._replace(values=self.values[rows])


class GradAccumulator(NamedTuple):
    """Where a backward kernel adds: grad_accum += grad_scale · grad, or `=` with `overwrite`.

    `needs_grad_weight` is False where the convolution's weight does not learn; its gradient is then None.
    """

    grad_scale: Tensor
    grad_accum: Tensor
    overwrite: bool = False
    needs_grad_weight: bool = True

    def tile(self, rows: slice) -> "GradAccumulator":
        return self._replace(grad_accum=self.grad_accum[rows])


class Conv1x1(NamedTuple):
    """output = relu(scale · values + shift) @ weight.T, with weight (out_channels, in_channels)."""

    input: AffineInput
    weight: Tensor
    output: Tensor


class BatchNormBackward(NamedTuple):
    """grad_input = scale · values + shift + grad_scale · grad_accum: a batch norm's backward, its two sums being known.

    It is r · (g − mean(g) − x̂ · mean(g · x̂)) with the terms in x and the constant ones collected in `input`.
    """

    input: AffineInput
    accumulator: GradAccumulator


Statistics = tuple[Tensor, Tensor]
"""Mean and biased variance of each channel."""

NormSums = tuple[Tensor, Tensor]
"""Σ grad and Σ grad · values over the rows, grad being the gradient behind the ReLU: (channels,) each."""

ConvGradients = tuple[Tensor | None, Tensor, Tensor]
"""grad_weight (None where it is not needed) and the two sums of `NormSums`."""


class Kernels(Protocol):
    """A set of kernels. Modules implement it: `portable`, `numba_cpu.operations`, `triton_gpu.operations`."""

    def batch_statistics(self, values: Tensor) -> Statistics: ...

    def batch_norm_grad_input(self, grad: BatchNormBackward) -> Tensor: ...

    def affine_forward(self, input: AffineInput) -> Tensor:
        """scale · values + shift, without ReLU: a norm whose output leaves the stage."""
        ...

    def affine_backward(self, grad_output: Tensor, input: AffineInput, accumulator: GradAccumulator) -> NormSums: ...

    def conv1x1_forward(self, conv: Conv1x1) -> None: ...

    def conv1x1_forward_with_statistics(self, conv: Conv1x1) -> Statistics:
        """The same, and the statistics of the output."""
        ...

    def conv1x1_backward(
        self,
        grad_output: BatchNormBackward,
        input: AffineInput,
        weight: Tensor,
        accumulator: GradAccumulator,
        next_bottleneck: Conv1x1 | None = None,
    ) -> ConvGradients:
        """Also computes `next_bottleneck`, the layer below's, while the tile is in cache: it reads some of the same
        channels and may overwrite what `grad_output` reads."""
        ...

    def conv3x3_forward(self, input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1) -> Tensor:
        """A 3×3 convolution (3 or 3×3×3 in other dimensions) with padding = dilation."""
        ...

    def conv3x3_forward_with_statistics(
        self, input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def conv3x3_backward(
        self,
        grad_output: Tensor,
        input: AffineInput,
        weight: Tensor,
        accumulator: GradAccumulator,
        shape: torch.Size,
        dilation: int = 1,
    ) -> ConvGradients: ...

    def pooled_conv1x1_forward(self, input: AffineInput, weight: Tensor, shape: torch.Size) -> Tensor:
        """A 1×1 convolution, then average pooling of 2×2 pixels; computed in the other order, a quarter of the work."""
        ...

    def pooled_conv1x1_backward(
        self,
        grad_output: Tensor,
        input: AffineInput,
        weight: Tensor,
        accumulator: GradAccumulator,
        shape: torch.Size,
    ) -> ConvGradients: ...
