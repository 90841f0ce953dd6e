"""Max pooling with the indices of its maxima, for any number of dimensions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._dimensions import dimensions_of


class MaxPool(NamedTuple):
    """The settings of the pooling. Signals are pooled as images of one row, as in PyTorch."""

    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    ceil_mode: bool

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The maxima and their indices in the image's pixels, both (N, C, *pooled)."""
        if values.dim() == 3:
            maxima, indices = self._for_images().forward(values.unsqueeze(2))
            return maxima.squeeze(2), indices.squeeze(2)
        return dimensions_of(values).max_pool(values, *self, return_indices=True)

    def backward(self, grad_output: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        """grad_output scattered to `indices`, of the shape and memory format of `values`."""
        if grad_output.dim() == 3:
            tensors = (tensor.unsqueeze(2) for tensor in (grad_output, indices, values))
            return self._for_images().backward(*tensors).squeeze(2)
        name = f"max_pool{grad_output.dim() - 2}d_with_indices_backward"
        return getattr(torch.ops.aten, name)(grad_output, values, *self, indices)

    def pooled_size(self, size: Sequence[int]) -> list[int]:
        """The spatial size of the pooled images; below 1 where a side has no window."""
        sides = zip(size, self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        return [_pooled_side(*side, self.ceil_mode) for side in sides]

    def _for_images(self) -> "MaxPool":
        kernel_size, stride, padding, dilation, ceil_mode = self
        return MaxPool((1, *kernel_size), (1, *stride), (0, *padding), (1, *dilation), ceil_mode)


def max_pool_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of PyTorch's pooling of images like x in `dtype`. Autocast may change it: of volumes on a CPU."""
    return dimensions_of(x).max_pool(x.new_zeros([1] * x.dim(), dtype=dtype), 1).dtype


def _pooled_side(side: int, kernel_size: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """The size of a pooled side. With `ceil_mode` the last window may end outside the image, but must begin inside
    it or in the left padding."""
    beyond_first = side + 2 * padding - dilation * (kernel_size - 1) - 1
    if not ceil_mode:
        return beyond_first // stride + 1
    pooled = -(-beyond_first // stride) + 1
    return pooled - 1 if (pooled - 1) * stride >= side + padding else pooled
