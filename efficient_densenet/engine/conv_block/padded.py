"""3×3 convolutions that pad by reflection or replication, on features stored in a matrix, by PyTorch's operations.

A tile of images is padded and convolved at a time, as in `kernels.portable`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._dimensions import dimensions_of
from ..._tensors import CHANNELS_LAST, accumulation_dtype, formatted
from ...kernels.interface import GradAccumulator
from ...kernels.portable import to_pixel_matrix, to_spatial
from ...kernels.row_tiles import WHOLE, rows, tiles

_NAMES = {"reflect": "reflection", "replicate": "replication"}


def pad(images: Tensor, dilation: int, mode: str) -> Tensor:
    """Images padded by as many pixels at every side as a 3×3 convolution reads there."""
    return F.pad(images, [dilation] * 2 * (images.dim() - 2), mode=mode)


def conv3x3_forward(values: Tensor, weight: Tensor, shape: torch.Size, dilation: int, mode: str) -> Tensor:
    """The convolution of (pixels, channels), without a bias: (pixels, out_channels)."""
    outputs = []
    for _, images in _image_tiles(values, shape):
        output = dimensions_of(images).conv(pad(images, dilation, mode), weight, dilation=dilation)
        outputs.append(to_pixel_matrix(output))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def conv3x3_backward(
    grad: Tensor,
    values: Tensor,
    weight: Tensor,
    accumulator: GradAccumulator,
    shape: torch.Size,
    dilation: int,
    mode: str,
) -> Tensor | None:
    """Accumulates the gradient of the values, and returns that of the weight, if it is needed."""
    total, dims = None, len(shape) - 1
    unpad = getattr(torch.ops.aten, f"{_NAMES[mode]}_pad{dims}d_backward").default
    settings = None, [1] * dims, [0] * dims, [dilation] * dims, False, [0] * dims, 1
    mask = [True, accumulator.needs_grad_weight, False]
    for tile, images in _image_tiles(values, shape):
        grads = _images(grad, tile, shape), pad(images, dilation, mode), weight
        grad_padded, grad_weight, _ = torch.ops.aten.convolution_backward.default(*grads, *settings, mask)
        grad_images = unpad(grad_padded, images, [dilation] * 2 * dims)
        into = _images(accumulator.grad_accum, tile, shape)
        into.copy_(grad_images) if accumulator.overwrite else into.add_(grad_images)
        if accumulator.needs_grad_weight:
            grad_weight = grad_weight.to(accumulation_dtype(weight.dtype))
            total = grad_weight if total is None else total.add_(grad_weight)
    return total


def _image_tiles(values: Tensor, shape: torch.Size) -> Iterator[tuple[slice, Tensor]]:
    for tile in tiles(values, values.dtype, multiple_of=shape[1:].numel()):
        yield tile, formatted(_images(values, tile, shape), CHANNELS_LAST.get(len(shape) + 1, torch.contiguous_format))


def _images(matrix: Tensor, tile: slice, shape: torch.Size) -> Tensor:
    """The images in a tile of rows."""
    part = rows(matrix, tile)
    images = shape if tile is WHOLE else torch.Size([len(part) // shape[1:].numel(), *shape[1:]])
    return to_spatial(part, images)
