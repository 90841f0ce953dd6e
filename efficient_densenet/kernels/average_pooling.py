"""Average pooling over windows of two pixels in every dimension, on images of any number of dimensions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._tensors import accumulation_dtype, autocast_enabled


def average_pool(images: Tensor) -> Tensor:
    """The mean of every 2×2 pixels (2 or 2×2×2 in other dimensions)."""
    if images.dim() == 3:  # as in PyTorch: images of one row
        return F.avg_pool2d(images.unsqueeze(2), (1, 2)).squeeze(2)
    if images.dim() == 4:
        return F.avg_pool2d(images, 2)
    # On a CPU, PyTorch has no avg_pool3d in half precisions.
    return F.avg_pool3d(images.to(accumulation_dtype(images.dtype)), 2).to(images.dtype)


def average_pool_dtype(images: Tensor) -> torch.dtype:
    """The dtype of the output of PyTorch's own pooling: under autocast on a CPU, float32 for volumes."""
    if images.dim() < 5 or not autocast_enabled(images):
        return images.dtype
    return F.avg_pool3d(images.new_zeros([1] * 5), 1).dtype


def average_pool_backward(grad_output: Tensor, images: Tensor) -> Tensor:
    if images.dim() == 3:
        kernel_size, grad_output, images = [1, 2], grad_output.unsqueeze(2), images.unsqueeze(2)
        settings = kernel_size, kernel_size, [0, 0], False, True, None
        return torch.ops.aten.avg_pool2d_backward(grad_output, images, *settings).squeeze(2)
    if images.dim() == 4:
        return torch.ops.aten.avg_pool2d_backward(grad_output, images, [2, 2], [2, 2], [0, 0], False, True, None)
    dtype, kernel_size = accumulation_dtype(grad_output.dtype), [2, 2, 2]
    settings = kernel_size, kernel_size, [0, 0, 0], False, True, None
    grad_input = torch.ops.aten.avg_pool3d_backward(grad_output.to(dtype), images.to(dtype), *settings)
    return grad_input.to(grad_output.dtype)


def as_slabs(shape: torch.Size) -> torch.Size:
    """A volume of even depth as slabs of two planes; any other shape unchanged.

    No pooling window crosses two slabs, and a whole volume might be too large a tile.
    """
    if len(shape) != 4 or shape[1] % 2:
        return shape
    return torch.Size([shape[0] * shape[1] // 2, 2, *shape[2:]])
