"""The interface that every set of kernels implements, and the arguments of its kernels.

Layout: a pixel matrix is (pixels, channels), one row for each pixel of each image, as in channels_last memory. It may
be a slice of the channels of a larger matrix: its row stride is then larger than its number of channels.
`shape` is (images, *spatial), so that pixels = shape.numel(). Vectors are (channels,), in the accumulation dtype:
float32 for half precisions, else the values' dtype.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._tensors import as_dtype
from .activations import RELU_SPEC, ActivationSpec
from .max_pooling import MaxPool

MEAN, VARIANCE, INV_STD = range(3)
"""The rows of a matrix of statistics."""


class _BatchNorm(NamedTuple):
    weight: Tensor
    bias: Tensor
    inv_std: Tensor
    mean: Tensor | None = None
    frozen: bool = False


class BatchNormAffine(_BatchNorm):
    """One norm as an affine map: y = γ · (x − μ) · r + β = scale · x + shift, with r = 1 / sqrt(var + eps).

    `mean`, μ, is None where the values are stored centered (their batch mean is subtracted). `frozen` norms have
    running statistics. `weight`, γ, and `bias`, β, have the dtype of the parameters, all other vectors the dtype of the
    statistics. `scale` and `shift` are computed when they are first read: some kernels read only the vectors.
    """

    @functools.cached_property
    def scale(self) -> Tensor:
        """γ · r"""
        return as_dtype(self.weight, self.inv_std.dtype) * self.inv_std

    @functools.cached_property
    def shift(self) -> Tensor:
        """β − μ · scale"""
        bias = as_dtype(self.bias, self.inv_std.dtype)
        return bias if self.mean is None else torch.addcmul(bias, self.mean, self.scale, value=-1)

    @property
    def grad_scale(self) -> Tensor:
        """The factor with which grad_accum accumulates the gradient of the norm's output.

        Under a frozen norm it is γ · r: grad_accum is the gradient of the values. Under batch statistics it is γ:
        grad_accum is the gradient of the normalized values x̂, and the batch norm's backward computes the rest.
        """
        return self.scale if self.frozen else as_dtype(self.weight, self.inv_std.dtype)

    def grad_conv_bias(self, grad_bias: Tensor) -> Tensor:
        """The gradient of the bias of the convolution before the norm, from the norm's own `grad_bias`.

        Batch statistics remove a bias: its gradient is zero, summed over the processes of a sync group.
        """
        return self.scale * grad_bias if self.frozen else torch.zeros_like(grad_bias)

    def grad_weight(self, grad_sum: Tensor, grad_values_sum: Tensor) -> Tensor:
        """Σ grad · x̂, from Σ grad and Σ grad · values."""
        centered = grad_values_sum
        if self.mean is not None:
            centered = torch.addcmul(grad_values_sum, self.mean, grad_sum, value=-1)
        return centered * self.inv_std


class AffineInput(NamedTuple):
    """A convolution's input y = f(scale · values + shift): a batch norm and its activation f, applied on the fly."""

    values: Tensor  # (pixels, channels)
    norm: BatchNormAffine
    activation: ActivationSpec = RELU_SPEC

    @property
    def dtype(self) -> torch.dtype:
        """The accumulation dtype."""
        return self.norm.inv_std.dtype

    def columns(self, columns: slice) -> "AffineInput":
        """These of the channels."""
        norm = self.norm._replace(**{k: v[columns] for k, v in self.norm._asdict().items() if isinstance(v, Tensor)})
        return self._replace(values=self.values[:, columns], norm=norm)

    def tile(self, rows: slice) -> "AffineInput":
        return self._replace(values=self.values[rows])


class GradAccumulator(NamedTuple):
    """The place in which a backward kernel accumulates: grad_accum += grad_scale · grad, or `=` with `overwrite`.

    γ · grad_bias and γ · grad_weight of the norm are added to `sums`, (2, channels), which is None under a frozen norm.
    `needs_grad_weight` is False where the convolution's weight does not require a gradient. With `only_consumer`, no
    other norm reads the values, in any process: the kernel may compute their gradient and return it as
    `Gradients.norm_input`; grad_accum and sums are then undefined.
    """

    grad_accum: Tensor  # (pixels, channels)
    overwrite: bool = False
    needs_grad_weight: bool = True
    sums: Tensor | None = None
    only_consumer: bool = False

    def tile(self, rows: slice) -> "GradAccumulator":
        return self._replace(grad_accum=self.grad_accum[rows])


class Gradients(NamedTuple):
    """The gradients of the parameters, which a backward kernel returns; the norm's are in the accumulation dtype.
    `norm_input` is the gradient of the norm's input, (pixels, channels), where the kernel has computed it."""

    norm_weight: Tensor
    norm_bias: Tensor
    conv_weight: Tensor | None = None
    norm_input: Tensor | None = None


class StatisticsOutput(NamedTuple):
    """Where a kernel writes its output's statistics, (3, channels): mean, biased variance and, from `eps`,
    1 / sqrt(var + eps)."""

    matrix: Tensor
    eps: float

    @property
    def rows(self) -> Sequence[Tensor]:
        return self.matrix.unbind()


class Conv1x1(NamedTuple):
    """output = f(scale · values + shift) @ weight.T"""

    input: AffineInput
    weight: Tensor  # (out_channels, in_channels)
    output: Tensor  # (pixels, out_channels), written by the kernel


class ImageConv(NamedTuple):
    """A convolution of y = f(scale · values + shift), of which each row is a pixel of images: 3×3 (3 or 3×3×3 in other
    dimensions) with padding = dilation, or 1×1 with average pooling."""

    input: AffineInput
    weight: Tensor
    shape: torch.Size  # (images, *spatial)
    dilation: int = 1


class BatchNormBackward(NamedTuple):
    """grad_input = r · (g − mean(g) − x̂ · mean(g · x̂)): a batch norm's backward with known sums.

    g is `grad_accum`, `sums` are Σ g and Σ g · x̂ over `count` rows, (2, channels), and `inv_std` is r. x̂ is
    (values − mean) · r; `mean` is None where the values are stored centered. Where `inv_std` and `sums` are None, as
    under a frozen norm, `grad_accum` is grad_input already.
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
    """A set of kernels, which a module implements. `portable` shows each of them in a few lines of PyTorch.

    `*_forward` reads an `AffineInput` y. `*_backward` computes the gradient of y, multiplies it by the activation's
    derivative, accumulates the product g in `accumulator`, and returns the gradients of the norm and, where it is
    needed, of the convolution's weight.
    """

    def batch_statistics(self, values: Tensor, statistics: StatisticsOutput) -> None:
        """Writes the statistics over the rows of values, (pixels, channels)."""
        ...

    def center(self, values: Tensor, mean: Tensor, output: Tensor) -> None:
        """Writes output = values − mean, (pixels, channels)."""
        ...

    def batch_norm_grad_input(
        self, grad: BatchNormBackward, may_overwrite: bool = False, previous: Tensor | None = None
    ) -> Tensor:
        """r · (g − mean(g) − x̂ · mean(g · x̂)), (pixels, channels), contiguous; with `may_overwrite` the result may be
        g itself, overwritten in place. `previous` is an earlier result of its shape that may be overwritten."""
        ...

    def arranged_weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The weights of 3×3 convolutions in the memory format that the kernels read: all at once, since it would take
        the host long to copy each. The kernels take others too."""
        ...

    def affine_forward(self, input: AffineInput) -> Tensor:
        """scale · values + shift without activation, (pixels, channels): a norm whose output leaves the stage."""
        ...

    def affine_backward(self, grad_output: Tensor, input: AffineInput, accumulator: GradAccumulator) -> Gradients:
        """The backward of `affine_forward`, with g = grad_output."""
        ...

    def conv1x1_forward(self, conv: Conv1x1, statistics: StatisticsOutput | None = None) -> None:
        """Writes conv.output and, where they are asked for, its statistics."""
        ...

    def conv1x1_backward(
        self,
        grad_output: BatchNormBackward,
        input: AffineInput,
        weight: Tensor,
        accumulator: GradAccumulator,
        next_bottleneck: Conv1x1 | None = None,
    ) -> Gradients:
        """g = grad_output @ weight, grad_weight = grad_output.T @ y, with grad_output computed on the fly.

        Also computes `next_bottleneck`, the bottleneck of the next layer in the backward, while a tile of the
        features is in cache: it reads some of the same channels, and its output may be the memory of
        `grad_output.values`.
        """
        ...

    def conv3x3_forward(self, conv: ImageConv, statistics: StatisticsOutput | None = None) -> Tensor:
        """A 3×3 convolution, (pixels, out_channels); writes its statistics where they are asked for."""
        ...

    def conv3x3_backward(self, grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> Gradients:
        """The backward of `conv3x3_forward`, given grad_output (pixels, out_channels)."""
        ...

    def pooled_conv1x1_forward(self, conv: ImageConv) -> Tensor:
        """average_pool(y @ weight.T) over 2×2 pixels, computed as average_pool(y) @ weight.T: a quarter of the work.

        (pooled pixels, out_channels); pixels at the edge of an odd size are in no window, as in PyTorch.
        """
        ...

    def pooled_conv1x1_backward(self, grad_output: Tensor, conv: ImageConv, accumulator: GradAccumulator) -> Gradients:
        """The backward of `pooled_conv1x1_forward`, given grad_output (pooled pixels, out_channels)."""
        ...

    def images_at_once(self, x: Tensor, shape: torch.Size) -> int:
        """The number of images of x that a stem's convolution reads at a time; `shape` is the shape of its output."""
        ...

    def image_statistics(self, values: Tensor, statistics: StatisticsOutput) -> None:
        """Writes the statistics of each channel of images, (N, channels, *spatial)."""
        ...

    def norm_activation_max_pool(self, input: AffineInput, pool: MaxPool, dtype: torch.dtype) -> Tensor:
        """max_pool(f(norm(values))) in `dtype`, in the memory format of `values`, which are images here and below.

        As in plain modules, the outputs of the norm and of the activation f are rounded to the dtype of `values`.
        """
        ...

    def norm_activation_max_pool_reduce(
        self, grad_output: Tensor, input: AffineInput, pool: MaxPool
    ) -> tuple[Tensor, Gradients]:
        """The indices of the maxima, −1 where a ReLU is inactive, for `norm_activation_max_pool_backward`; and the
        gradients of the norm."""
        ...

    def norm_activation_max_pool_backward(
        self, grad_output: Tensor, indices: Tensor, input: AffineInput, pool: MaxPool, sums: Gradients, count: int
    ) -> None:
        """Writes the gradient of `values` over them. `sums` are the norm's gradients over all `count` values of a
        channel, which a frozen norm does not need."""
        ...
