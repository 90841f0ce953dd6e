"""Every kernel as a function of (kernels, case), where a case holds random arguments: to compare sets of kernels."""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import portable
from .activations import ActivationSpec
from .interface import (
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    Conv1x1,
    GradAccumulator,
    Gradients,
    ImageConv,
    StatisticsOutput,
)
from .max_pooling import MaxPool

Results = Sequence[Tensor]
AnyCase = TypeVar("AnyCase", bound="_Arguments")

EPS = 1e-3

_CONSTANTS = {"leaky_relu": (0.2,), "elu": (0.7,), "hardtanh": (-0.5, 2.0)}
"""The constants of a case's activation."""


def _activation(name: str) -> ActivationSpec:
    """The activation of a case."""
    return ActivationSpec(name, *_CONSTANTS.get(name, ()))


class _Arguments:
    device: torch.device | str
    dtype: torch.dtype

    def in_float64(self: AnyCase) -> AnyCase:
        """A copy of the arguments in float64."""
        case = self._mapped(Tensor.double)
        case.dtype = torch.float64
        return case

    def on(self: AnyCase, device: torch.device | str) -> AnyCase:
        """A copy of the arguments on another device. Slices of matrices may be contiguous there."""
        case = self._mapped(lambda tensor: tensor.to(device))
        case.device = device
        return case

    def _mapped(self: AnyCase, function: Callable[[Tensor], Tensor]) -> AnyCase:
        case = copy.copy(self)
        vars(case).update({name: function(each) for name, each in vars(self).items() if isinstance(each, Tensor)})
        return case


class Case(_Arguments):
    """Random arguments for every operation. Each matrix is a slice of the channels of one that is wider by `padding`.

    `activation` is a name in `activations.TABLE`. `centered` values have no mean to subtract, and so has a centered
    bottleneck, which is by default as the values.
    """

    def __init__(
        self,
        shape: Sequence[int],
        channels: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        overwrite: bool = False,
        device: torch.device | str = "cpu",
        centered: bool = False,
        frozen: bool = False,
        needs_grad_weight: bool = True,
        dilation: int = 1,
        padding: int = 3,
        centered_bottleneck: bool | None = None,
        activation: str = "relu",
    ) -> None:
        self.centered_bottleneck = centered if centered_bottleneck is None else centered_bottleneck
        self.device, self.frozen, self.padding = device, frozen, padding
        self.overwrite, self.dilation, self.needs_grad_weight = overwrite, dilation, needs_grad_weight
        self.shape, self.dtype, num_rows = torch.Size(shape), dtype, math.prod(shape)
        self.values, self.grad_accum = self._matrix(num_rows, channels), self._matrix(num_rows, channels)
        self.norm_weight, self.norm_bias, mean = (torch.randn(channels, device=self.device) for _ in range(3))
        self.inv_std, self.mean = torch.rand(channels, device=self.device) + 0.5, None if centered else mean
        self.sums = torch.randn(2, channels + 4, device=self.device)[:, 3 : channels + 3]
        self.activation = _activation(activation)
        self.weight1x1, self.pooled_weight = self._matrix(width, channels), self._matrix(channels // 2 + 1, channels)
        self.weight3x3 = torch.randn(width, channels, *[3] * (len(shape) - 1), device=self.device).to(dtype)
        self.grad_output, self.grad_affine = self._matrix(num_rows, width), self._matrix(num_rows, channels)
        self.grad_pooled = self._matrix(portable.halved(self.shape).numel(), len(self.pooled_weight))

    def _matrix(self, num_rows: int, channels: int) -> Tensor:
        return torch.randn(num_rows, channels + self.padding, device=self.device).to(self.dtype)[:, :channels]

    def norm(self, channels: int | None = None) -> BatchNormAffine:
        """The norm of the values, or of the first channels."""
        mean = None if self.mean is None else self.mean[:channels]
        weight, bias, inv_std = (vector[:channels] for vector in (self.norm_weight, self.norm_bias, self.inv_std))
        return BatchNormAffine(weight, bias, inv_std, mean, self.frozen)

    @property
    def input(self) -> AffineInput:
        return AffineInput(self.values, self.norm(), self.activation)

    def accumulator(self, grad_accum: Tensor, overwrite: bool = False) -> GradAccumulator:
        """Under a frozen norm there are no sums."""
        sums = None if self.frozen else self.sums.clone()
        return GradAccumulator(grad_accum, overwrite, self.needs_grad_weight, sums)

    def results(self, grads: Gradients, accumulator: GradAccumulator) -> Results:
        """The tensors that a backward kernel has returned and written."""
        conv_weight = [] if grads.conv_weight is None else [grads.conv_weight]
        sums = [] if accumulator.sums is None else [accumulator.sums]
        return *conv_weight, grads.norm_bias, grads.norm_weight, *sums, accumulator.grad_accum

    def batch_norm_backward(
        self, values: Tensor, grad_accum: Tensor, channels: int, centered: bool | None = None
    ) -> BatchNormBackward:
        """A batch norm's backward, with vectors of its own."""
        centered = self.mean is None if centered is None else centered
        if self.frozen:
            return BatchNormBackward(values, grad_accum)
        generator = torch.Generator().manual_seed(channels)
        vectors = torch.randn(4, channels + 1, generator=generator).to(self.device, self.inv_std.dtype)
        mean, inv_std = vectors[0, 1:], vectors[1, 1:].abs() + 0.5
        count = len(values)
        return BatchNormBackward(
            values, grad_accum, inv_std, None if centered else mean, vectors[2:, 1:] * count**0.5, count
        )

    def with_statistics(self, function: Callable[[StatisticsOutput], Any], channels: int) -> Results:
        """The tensor that `function` returns, if any, and the statistics that it writes into columns of a wider
        matrix."""
        matrix = torch.zeros(3, channels + 5, device=self.device, dtype=self.inv_std.dtype)
        result = function(StatisticsOutput(matrix[:, 2 : channels + 2], EPS))
        assert not matrix[:, :2].any()
        assert not matrix[:, channels + 2 :].any()
        return *([] if result is None else [result]), *matrix[:, 2 : channels + 2]

    def conv1x1(self, function: Callable[[Conv1x1], object]) -> Tensor:
        """The output of a 1×1 convolution that `function` computes."""
        output = self.weight1x1.new_empty(len(self.values), len(self.weight1x1))
        function(Conv1x1(self.input, self.weight1x1, output))
        return output

    def conv1x1_with_statistics(self, kernels: Any) -> Results:
        def function(statistics: StatisticsOutput) -> Tensor:
            return self.conv1x1(lambda conv: kernels.conv1x1_forward(conv, statistics))

        return self.with_statistics(function, len(self.weight1x1))

    @property
    def conv3x3(self) -> ImageConv:
        return ImageConv(self.input, self.weight3x3, self.shape, self.dilation)

    @property
    def pooled_conv1x1(self) -> ImageConv:
        return ImageConv(self.input, self.pooled_weight, self.shape)

    def values_less_mean(self, kernels: Any) -> Tensor:
        """The values without a mean, written into columns of a wider matrix."""
        channels = self.values.shape[1]
        matrix = self.values.new_zeros(len(self.values), channels + self.padding)
        kernels.center(self.values, self.sums[0], matrix[:, :channels])
        assert not matrix[:, channels:].any()
        return matrix[:, :channels]

    def grad_bottleneck(self, values: Tensor) -> BatchNormBackward:
        return self.batch_norm_backward(values, self.grad_output, values.shape[1], self.centered_bottleneck)

    def next_bottleneck(self, kernels: Any) -> Results:
        """A call as the engine's, with fewer channels and in place of the values behind grad_output."""
        fewer, output = max(1, self.values.shape[1] - 2), self.grad_output.clone(memory_format=torch.contiguous_format)
        input = AffineInput(self.values[:, :fewer], self.norm(fewer), self.activation)
        grad_output, accumulator = self.grad_bottleneck(output), self.accumulator(self.grad_accum.clone())
        conv = Conv1x1(input, self.weight1x1[:, :fewer], output)
        grads = kernels.conv1x1_backward(grad_output, self.input, self.weight1x1, accumulator, conv)
        return *self.results(grads, accumulator), output

    def backward(self, function: Callable[..., Gradients], *arguments: Any) -> Results:
        """The tensors that a backward kernel returns and writes; grad_accum is a slice of a wider buffer's channels."""
        channels = self.grad_accum.shape[1]
        buffer = self.grad_accum.new_zeros(len(self.grad_accum), channels + self.padding)
        accumulator = self.accumulator(buffer[:, :channels].copy_(self.grad_accum), self.overwrite)
        grads = function(*arguments, accumulator)
        assert not buffer[:, channels:].any()
        has_weight = not isinstance(arguments[-1], AffineInput)
        assert (grads.conv_weight is not None) == (has_weight and self.needs_grad_weight)
        return self.results(grads, accumulator)


OPERATIONS: dict[str, Callable[[Any, Case], Results]] = {
    "batch_statistics": lambda k, c: c.with_statistics(
        lambda statistics: k.batch_statistics(c.values, statistics), c.values.shape[1]
    ),
    "center": lambda k, c: [c.values_less_mean(k)],
    "affine_forward": lambda k, c: [k.affine_forward(c.input)],
    "affine_backward": lambda k, c: c.backward(k.affine_backward, c.grad_affine, c.input),
    "conv1x1_forward": lambda k, c: [c.conv1x1(k.conv1x1_forward)],
    "conv1x1_forward_with_statistics": lambda k, c: c.conv1x1_with_statistics(k),
    "conv1x1_backward": lambda k, c: c.backward(
        k.conv1x1_backward, c.grad_bottleneck(c.grad_output), c.input, c.weight1x1
    ),
    "conv1x1_next_bottleneck": lambda k, c: c.next_bottleneck(k),
    "conv3x3_forward": lambda k, c: [k.conv3x3_forward(c.conv3x3)],
    "conv3x3_forward_with_statistics": lambda k, c: c.with_statistics(
        functools.partial(k.conv3x3_forward, c.conv3x3), len(c.weight3x3)
    ),
    "conv3x3_backward": lambda k, c: c.backward(k.conv3x3_backward, c.grad_output, c.conv3x3),
    "pooled_conv1x1_forward": lambda k, c: [k.pooled_conv1x1_forward(c.pooled_conv1x1)],
    "pooled_conv1x1_backward": lambda k, c: c.backward(k.pooled_conv1x1_backward, c.grad_pooled, c.pooled_conv1x1),
    "batch_norm_grad_input": lambda k, c: [
        k.batch_norm_grad_input(c.batch_norm_backward(c.values, c.grad_accum, c.values.shape[1]), previous=previous)
        for previous in (None, c.values.new_empty(c.values.shape))
    ],
}


_POOL = MaxPool([3, 3], [2, 2], [1, 1], [1, 1], False)


class StemCase(_Arguments):
    """Small integers as a stem's images and norm, so that sets of kernels round alike and find the same maxima."""

    def __init__(
        self,
        channels: int,
        dtype: torch.dtype,
        memory_format: torch.memory_format = torch.contiguous_format,
        size: tuple[int, int] = (9, 14),
        activation: str = "relu",
        pool: MaxPool = _POOL,
        frozen: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = device
        values = torch.randint(-3, 4, (2, channels, *size), device=device)
        grad = torch.randint(-4, 5, (2, channels, *pool.pooled_size(size)), device=device)
        self.values, self.grad_output = (
            images.to(dtype).contiguous(memory_format=memory_format) for images in (values, grad)
        )
        vectors = torch.tensor([[1.0, -1, 2], [1, 2, -1], [0.5, 1, 2], [0, 1, -2]], device=device)
        self.vectors = vectors.repeat(1, channels)[:, :channels].contiguous()
        self.activation, self.pool, self.frozen = _activation(activation), pool, frozen

    def input(self, values: Tensor) -> AffineInput:
        weight, bias, inv_std, mean = self.vectors
        return AffineInput(values, BatchNormAffine(weight, bias, inv_std, mean, self.frozen), self.activation)

    def statistics(self, kernels: Any) -> Results:
        matrix = torch.zeros(3, self.values.shape[1], device=self.values.device, dtype=self.vectors.dtype)
        kernels.image_statistics(self.values, StatisticsOutput(matrix, EPS))
        return matrix.unbind()

    def backward(self, kernels: Any) -> Results:
        """The gradients of the norm and of the images."""
        grad_images, count = self.values.clone(memory_format=torch.preserve_format), self.values[:, 0].numel()
        input, images = self.input(self.values), self.input(grad_images)
        places, sums = kernels.norm_activation_max_pool_reduce(self.grad_output, input, self.pool)
        kernels.norm_activation_max_pool_backward(self.grad_output, places, images, self.pool, sums, count)
        return sums.norm_bias, sums.norm_weight, grad_images


STEM_OPERATIONS: dict[str, Callable[[Any, StemCase], Results]] = {
    "image_statistics": lambda k, c: c.statistics(k),
    "norm_activation_max_pool": lambda k, c: [k.norm_activation_max_pool(c.input(c.values), c.pool, c.values.dtype)],
    "norm_activation_max_pool_backward": lambda k, c: c.backward(k),
}


SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "overwrite": {"overwrite": True},
    "centered": {"centered": True},
    "frozen": {"frozen": True},
    "no_grad_weight": {"needs_grad_weight": False},
}
"""Arguments of a case, for what a kernel does in another way."""


def is_valid(operation: str, shape: Sequence[int] = (), channels: int = 2, setting: str = "usual", **_: object) -> bool:
    """Whether a setting changes what an operation does; it is tried on several rows and channels. A pooled operation
    needs a pooling window."""
    if "pooled" in operation and min(shape[1:], default=2) < 2:
        return False
    if setting == "usual":
        return True
    applies = {
        "overwrite": "backward" in operation,
        "centered": operation not in ("batch_statistics", "center"),
        "frozen": operation not in ("batch_statistics", "center"),
        "no_grad_weight": operation.startswith(("conv", "pooled")) and operation.endswith("backward"),
    }
    return channels > 1 and math.prod(shape) > 7 and applies[setting]
