"""The interface that every set of kernels implements, and the arguments of its kernels.

Layout: a pixel matrix is (pixels, channels), one row for each pixel of each image, as channels_last memory lies. It may
be a slice of the channels of a larger matrix: its row stride is then larger than its number of channels.
`shape` is (images, *spatial), so that pixels = shape.numel(). Vectors are (channels,), in the accumulation dtype:
float32 for half precisions, else the values' own.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._tensors import as_dtype

MEAN, VARIANCE, INV_STD = range(3)
"""The rows of a matrix of statistics."""


class BatchNormAffine:
    """One norm as an affine map, and, once a backward kernel has computed them, the norm's own gradients.

    With mean μ, r = 1 / sqrt(var + eps) and the norm's parameters γ and β: y = γ · (x − μ) · r + β = scale · x + shift.
    `mean` is None where the values are stored centered (less their batch mean).

    `weight` and `bias` have the dtype of the parameters, all else that of the statistics. A kernel may read the vectors
    themselves, and then nothing is computed from them before it runs.
    """

    grad_weight: Tensor
    grad_bias: Tensor
    grad_input: Tensor | None = None
    _activation: Tensor | None = None
    _scale: Tensor | None = None
    _shift: Tensor | None = None

    def __init__(self, weight: Tensor, bias: Tensor, inv_std: Tensor, mean: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.inv_std, self.mean = inv_std, mean

    @property
    def scale(self) -> Tensor:
        """γ · r"""
        if self._scale is None:
            self._scale = as_dtype(self.weight, self.inv_std.dtype) * self.inv_std
        return self._scale

    @property
    def shift(self) -> Tensor:
        """β − μ · scale"""
        if self._shift is None:
            bias = as_dtype(self.bias, self.inv_std.dtype)
            self._shift = bias if self.mean is None else torch.addcmul(bias, self.mean, self.scale, value=-1)
        return self._shift

    def input(self, values: Tensor) -> "AffineInput":
        """What the convolution after the norm reads."""
        return AffineInput(values, self)

    def grad_scale(self, frozen: bool) -> Tensor:
        """The factor of the gradient behind the ReLU in the accumulated gradient.

        That is the gradient of the values themselves under a frozen norm, and of the normalized values x̂ under one with
        batch statistics, whose r and mean terms follow in the batch norm's backward.
        """
        return self.scale if frozen else as_dtype(self.weight, self.inv_std.dtype)

    def grad_conv_bias(self, frozen: bool) -> Tensor:
        """The gradient of the bias of the convolution before the norm, Σ dx over the pixels, from the norm's gradients.

        Batch statistics remove a bias: its gradient is zero, summed over the processes of a sync group.
        """
        return self.scale * self.grad_bias if frozen else torch.zeros_like(self.grad_bias)

    def set_gradients(self, grad_sum: Tensor, grad_values_sum: Tensor) -> None:
        """From Σ grad and Σ grad · values: grad_bias = Σ grad and grad_weight = Σ grad · x̂."""
        self.grad_bias = grad_sum
        centered = grad_values_sum
        if self.mean is not None:
            centered = torch.addcmul(grad_values_sum, self.mean, grad_sum, value=-1)
        self.grad_weight = centered * self.inv_std

    def keep_activation(self, activation: Tensor) -> None:
        """Keep relu(y) of all values for the kernel that reads them next."""
        self._activation = activation

    def take_activation(self) -> Tensor | None:
        """relu(y), which the norm forgets, if a kernel has kept it: the caller may overwrite it."""
        activation, self._activation = self._activation, None
        return activation

    def take_grad_input(self) -> Tensor | None:
        """grad_input, which the norm forgets, if a kernel has computed it: see `GradAccumulator.is_complete`."""
        grad_input, self.grad_input = self.grad_input, None
        return grad_input

    def take_gradients(self) -> tuple[Tensor, Tensor]:
        """grad_weight and grad_bias. The norm forgets them: autograd copies a gradient that anyone else refers to."""
        grads = self.grad_weight, self.grad_bias
        del self.grad_weight, self.grad_bias
        return grads


class AffineInput(NamedTuple):
    """A convolution's input y = relu(scale · values + shift): a batch norm and its ReLU, applied on the fly."""

    values: Tensor  # (pixels, channels)
    norm: BatchNormAffine

    @property
    def scale(self) -> Tensor:
        return self.norm.scale

    @property
    def shift(self) -> Tensor:
        return self.norm.shift

    @property
    def dtype(self) -> torch.dtype:
        """The accumulation dtype."""
        return self.norm.inv_std.dtype

    def tile(self, rows: slice) -> "AffineInput":
        return self._replace(values=self.values[rows])


class GradAccumulator(NamedTuple):
    """Where a backward kernel accumulates: grad_accum += grad_scale · grad, or `=` with `overwrite`.

    `norm` is that of the kernel's input, which gets its grad_weight and grad_bias; γ · grad_bias and γ · grad_weight
    are added to `sums`, (2, channels), if there are any: not under a frozen norm, nor where `kernels.add_up_when_done`
    says that they are computed from grad_accum in the end. `needs_grad_weight` is False where the convolution's weight
    does not require a gradient: the kernel then returns None.

    `is_complete` where the norm has batch statistics, those of this process, and grad_accum no other consumer. A kernel
    may then compute the norm's own grad_input at once: it sets the norm's, and may leave grad_accum and `sums` alone.
    """

    norm: BatchNormAffine
    frozen: bool
    grad_accum: Tensor  # (pixels, channels)
    overwrite: bool = False
    needs_grad_weight: bool = True
    sums: Tensor | None = None
    is_complete: bool = False

    @property
    def grad_scale(self) -> Tensor:
        return self.norm.grad_scale(self.frozen)

    def tile(self, rows: slice) -> "GradAccumulator":
        return self._replace(grad_accum=self.grad_accum[rows])

    def finish(self, grad_sum: Tensor, grad_values_sum: Tensor) -> None:
        """Set the norm's gradients from Σ grad and Σ grad · values, and add to `sums`."""
        norm = self.norm
        norm.set_gradients(grad_sum, grad_values_sum)
        if self.sums is not None:
            self.sums.addcmul_(norm.grad_scale(False), torch.stack([norm.grad_bias, norm.grad_weight]))


class StatisticsOutput:
    """Where a kernel writes the statistics of its output, `matrix` (3, channels): mean, biased variance and, from
    `eps`, 1 / sqrt(var + eps). `rows` are views of these three.

    `norm` is the norm that reads the output by these statistics, where they are final: a kernel may apply it at once.
    On a CPU, the matrix must be zero before.
    """

    norm: BatchNormAffine | None = None

    def __init__(self, matrix: Tensor, eps: float, rows: Sequence[Tensor] | None = None) -> None:
        self.matrix, self.eps = matrix, eps
        self.rows: Sequence[Tensor] = matrix.unbind() if rows is None else rows


class Conv1x1(NamedTuple):
    """output = relu(scale · values + shift) @ weight.T"""

    input: AffineInput
    weight: Tensor  # (out_channels, in_channels)
    output: Tensor  # (pixels, out_channels), written by the kernel


class BatchNormBackward(NamedTuple):
    """grad_input = r · (g − mean(g) − x̂ · mean(g · x̂)): a batch norm's backward, its two sums being known.

    g is `grad_accum`, `sums` are Σ g and Σ g · x̂ over `count` rows, (2, channels), and `inv_std` is r. x̂ is
    (values − mean) · r; `mean` is None where the values are stored centered. `sums` is None where the kernel has to
    compute them, see `kernels.add_up_when_done`, and then there is a `mean`. Where `inv_std` is None too, as under a
    frozen norm, `grad_accum` is grad_input already.
    """

    values: Tensor  # (pixels, channels)
    grad_accum: Tensor  # (pixels, channels)
    inv_std: Tensor | None = None
    mean: Tensor | None = None
    sums: Tensor | None = None
    count: int = 1

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """grad_input = slope · values + constant + inv_std · grad_accum, where there are `sums`."""
        assert self.inv_std is not None
        assert self.sums is not None
        per_value = self.inv_std * (-1 / self.count)
        constant, slope = (self.sums * per_value).unbind()
        slope = slope * self.inv_std
        if self.mean is not None:
            constant = torch.addcmul(constant, self.mean, slope, value=-1)
        return slope, constant, self.inv_std


class Kernels(Protocol):
    """A set of kernels. Modules implement it: `portable`, `numba_cpu.operations`, `triton_gpu.operations`.

    `*_forward` reads an `AffineInput` y. `*_backward` computes g, the gradient of y, masks it by the ReLU,
    accumulates it in `accumulator`, sets the gradients of the accumulator's norm and adds to its sums. That of a
    convolution returns grad_weight, None where it is not needed. `portable` shows each of them in a few lines of
    PyTorch.
    """

    def batch_statistics(self, values: Tensor, statistics: StatisticsOutput) -> None:
        """Writes the statistics over the rows of values, (pixels, channels)."""
        ...

    def batch_norm_grad_input(self, grad: BatchNormBackward, may_overwrite: bool = False) -> Tensor:
        """r · (g − mean(g) − x̂ · mean(g · x̂)), (pixels, channels), contiguous; with `may_overwrite` it may instead be
        written over g, and is g itself then."""
        ...

    def affine_forward(self, input: AffineInput) -> Tensor:
        """scale · values + shift without ReLU, (pixels, channels): a norm whose output leaves the stage."""
        ...

    def affine_backward(self, grad_output: Tensor, input: AffineInput, accumulator: GradAccumulator) -> None:
        """The backward of `affine_forward`, with g = grad_output."""
        ...

    def conv1x1_forward(self, conv: Conv1x1) -> None:
        """Writes conv.output."""
        ...

    def conv1x1_forward_with_statistics(self, conv: Conv1x1, statistics: StatisticsOutput) -> None:
        """Writes conv.output and its statistics."""
        ...

    def conv1x1_backward(
        self,
        grad_output: BatchNormBackward,
        input: AffineInput,
        weight: Tensor,
        accumulator: GradAccumulator,
        next_bottleneck: Conv1x1 | None = None,
    ) -> Tensor | None:
        """g = grad_output @ weight, grad_weight = grad_output.T @ y, with grad_output computed on the fly.

        Also computes `next_bottleneck`, the bottleneck of the layer that the backward walks to next, while a tile of
        the features is in cache: it reads some of the same channels, and its output may be the memory of
        `grad_output.values`.
        """
        ...

    def conv3x3_forward(self, input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int = 1) -> Tensor:
        """A 3×3 convolution (3 or 3×3×3 in other dimensions) of y with padding = dilation: (pixels, out_channels)."""
        ...

    def conv3x3_forward_with_statistics(
        self, input: AffineInput, weight: Tensor, shape: torch.Size, dilation: int, statistics: StatisticsOutput
    ) -> Tensor:
        """The output of `conv3x3_forward`; writes its statistics."""
        ...

    def conv3x3_backward(
        self,
        grad_output: Tensor,
        input: AffineInput,
        weight: Tensor,
        accumulator: GradAccumulator,
        shape: torch.Size,
        dilation: int = 1,
    ) -> Tensor | None:
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
    ) -> Tensor | None:
        """The backward of `pooled_conv1x1_forward`, given grad_output (pooled pixels, out_channels)."""
        ...
