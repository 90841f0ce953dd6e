"""The shared engine's operations in plain PyTorch, on tensors of images × channels × pixels.

What is as wide as the concatenation exists for a few images at a time, in scratch that stays in the processor's cache.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_BYTES = 1 << 22


def tiles(features: Tensor, num_scratch: int) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
    """The images, a few at a time: which ones, their features, and as much scratch, the same for every tile."""
    images, channels, pixels = features.shape
    each = min(max(1, TILE_BYTES // (channels * pixels * features.element_size())), images)
    scratch = [features.new_empty(each, channels, pixels) for _ in range(num_scratch)]
    for start in range(0, images, each):
        tile = slice(start, min(start + each, images))
        values = features[tile]
        yield tile, values, [each[: len(values)] for each in scratch]


def centre(values: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Write `values` less their mean, channel by channel, and return mean and variance."""
    mean = values.mean((0, 2))
    torch.sub(values, mean[:, None], out=out)
    return mean, torch.linalg.vector_norm(out, dim=(0, 2)).square_().div_(values.numel() // values.shape[1])


def affine(features: Tensor, scale: Tensor, shift: Tensor, out: Tensor | None = None) -> Tensor:
    # Two passes in cache; addcmul with two broadcast arguments takes longer than both.
    return torch.mul(features, scale[:, None], out=out).add_(shift[:, None])


def rectified(features: Tensor, scale: Tensor, shift: Tensor, out: Tensor | None = None) -> Tensor:
    """ReLU of the affine map, the input of a convolution."""
    return affine(features, scale, shift, out).clamp_min_(0)


def product(weight: Tensor, features: Tensor, out: Tensor) -> None:
    """A 1×1 convolution: `weight` times the channels of each image."""
    torch.bmm(weight.expand(len(features), -1, -1), features, out=out)


def masked_(gradient: Tensor, activation: Tensor) -> Tensor:
    """Set to zero where the ReLU was shut."""
    return torch.ops.aten.threshold_backward.grad_input(gradient, activation, 0, grad_input=gradient)


def sums(gradient: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Channel by channel, the sum of the gradient and of its product with the features."""
    return gradient.sum((0, 2)), torch.linalg.vecdot(gradient, features).sum(0)


def input_gradient(gradient: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Of a 1×1 convolution."""
    return torch.bmm(weight.t().expand(len(gradient), -1, -1), gradient, out=out)


def weight_gradient(gradient: Tensor, features: Tensor) -> Tensor:
    """Of a 1×1 convolution."""
    return torch.bmm(gradient, features.transpose(1, 2)).sum(0)


def convolved(features: Tensor, weight: Tensor, size: torch.Size) -> Tensor:
    """A 3×3 convolution of pictures of `size`."""
    return F.conv2d(features.unflatten(2, size), weight, padding=1).flatten(2)


def convolution_gradients(
    gradient: Tensor, features: Tensor, weight: Tensor, size: torch.Size
) -> tuple[Tensor, Tensor]:
    """Of a 3×3 convolution: its input's and its weight's."""
    pictures = [tensor.unflatten(2, size) for tensor in (gradient, features)]
    ones = [1, 1]
    of_input, of_weight, _ = torch.ops.aten.convolution_backward(
        *pictures, weight, None, ones, ones, ones, False, [0, 0], 1, [True, True, False]
    )
    return of_input.flatten(2), of_weight


def pooled(features: Tensor, size: torch.Size) -> Tensor:
    """The mean of every 2×2 pixels."""
    return F.avg_pool2d(features.unflatten(2, size), 2).flatten(2)


def spread(gradient: Tensor, features: Tensor, size: torch.Size) -> Tensor:
    """The gradient of `pooled`."""
    half = torch.Size(side // 2 for side in size)
    return torch.ops.aten.avg_pool2d_backward(
        gradient.unflatten(2, half), features.unflatten(2, size), [2, 2], [2, 2], [0, 0], False, True, None
    ).flatten(2)
