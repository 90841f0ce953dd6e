"""A 1×1 convolution, dropout and max pooling by two, for a tile of rows at a time.

The convolution's output, dropout's noise and the pooling's indices exist for a tile only. What is kept of them is a
byte for each pooled value: which value of its window it was, or 255, if that was one which dropout had set to 0.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...kernels.interface import BatchNormBackward, Conv1x1, GradAccumulator, Gradients, ImageConv, Kernels
from ...kernels.portable import halved, to_pixel_matrix, to_spatial
from ...kernels.row_tiles import tiles
from .masks import drop_, scale


class MaxPooled(NamedTuple):
    """The convolution of images, whose weight is (out_channels, channels), and what follows it."""

    kernels: Kernels
    conv: ImageConv
    drop_rate: float

    def forward(self, bias: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The pooled values and their codes, both (pooled pixels, out_channels). `mask` are the values, (pixels,
        out_channels), that dropout keeps."""
        weight, num_pooled = self.conv.weight, halved(self.conv.shape).numel()
        output = weight.new_empty(num_pooled, len(weight))
        codes = weight.new_empty(num_pooled, len(weight), dtype=torch.uint8)
        for tile, pooled, shape in self._tiles():
            values = weight.new_empty(tile.stop - tile.start, len(weight))
            self.kernels.conv1x1_forward(Conv1x1(self.conv.input.tile(tile), weight, values))
            if bias is not None:
                values.add_(bias)
            if mask is not None:
                drop_(values, mask[tile], self.drop_rate)
            images, kept = to_spatial(values, shape), None if mask is None else to_spatial(mask[tile], shape)
            output[pooled], codes[pooled] = map(to_pixel_matrix, _pooled(images, kept))
        return output, codes

    def backward(
        self, grad_output: Tensor, codes: Tensor, accumulator: GradAccumulator, bias_dtype: torch.dtype
    ) -> tuple[Gradients, Tensor]:
        """The gradients of norm and weight, and of the bias."""
        weight, grads = self.conv.weight, None
        grad_bias = grad_output.new_zeros(len(weight), dtype=bias_dtype)
        for tile, pooled, shape in self._tiles():
            grad = grad_output.new_zeros(tile.stop - tile.start, len(weight))
            grad_pooled = grad_output[pooled] * scale(self.drop_rate) if self.drop_rate else grad_output[pooled]
            _scatter(grad_pooled, codes[pooled], grad, shape)
            grad_bias += grad.sum(0, dtype=bias_dtype)
            arguments = BatchNormBackward(grad, grad), self.conv.input.tile(tile), weight, accumulator.tile(tile)
            part = self.kernels.conv1x1_backward(*arguments)
            grads = part if grads is None else _sums(grads, part)
        assert grads is not None  # there is a tile
        return grads, grad_bias

    def _tiles(self) -> Iterator[tuple[slice, slice, torch.Size]]:
        """Tiles of the rows of the pixel matrix, the rows of the pooled matrix, and the shape of the tile's images. No
        window crosses two pairs of an image's rows, if it has an even number of them: these are images here."""
        _, side, *rest = self.conv.shape
        sides = (side, *rest) if side % 2 else (2, *rest)
        pixels = torch.Size(sides).numel()
        for tile in tiles(self.conv.input.values, self.conv.input.dtype, pixels):
            shape = torch.Size([(tile.stop - tile.start) // pixels, *sides])
            start = tile.start // pixels * halved(shape)[1:].numel()
            yield tile, slice(start, start + halved(shape).numel()), shape


def _pooled(images: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest value of each window and its code. As in PyTorch, this is the first of equal ones, and a NaN (of
    several the last one) is larger than any number."""
    places = list(_places(images))
    if kept is None:
        codes = [torch.full_like(place, code, dtype=torch.uint8) for code, place in places]
    else:  # 0 less 1 is 255, whatever the code
        codes = [place.bitwise_or(code) for code, place in _places(kept - 1)]
    (_, maxima), best = places[0], codes[0]
    for (_, place), code in zip(places[1:], codes[1:], strict=True):
        is_larger = (place > maxima).logical_or_(place != place)
        maxima, best = torch.where(is_larger, place, maxima), torch.where(is_larger, code, best)
    return maxima, best


def at_codes(images: Tensor, codes: Tensor) -> Tensor:
    """The value of each window, of (N, C, *spatial), that its code names, or 0; codes are (N, C, *pooled)."""
    values = torch.zeros_like(codes, dtype=images.dtype)
    for code, place in _places(images):
        values = torch.where(codes == code, place, values)
    return values


def _scatter(grad_pooled: Tensor, codes: Tensor, grad: Tensor, shape: torch.Size) -> None:
    """Write each gradient to the value of its window that its code names, and 0 to the others. All are matrices, with
    `grad` of images of this shape."""
    grad_pooled, codes = (to_spatial(each, halved(shape)) for each in (grad_pooled, codes))
    for code, place in _places(to_spatial(grad, shape)):
        place.copy_(torch.where(codes == code, grad_pooled, 0))


def _places(images: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The codes, each with a view of the values that have this place in their windows."""
    for code, offsets in enumerate(product((0, 1), repeat=images.dim() - 2)):
        sides = zip(offsets, images.shape[2:], strict=True)
        yield code, images[(slice(None), slice(None), *(slice(start, side // 2 * 2, 2) for start, side in sides))]


def _sums(total: Gradients, part: Gradients) -> Gradients:
    weight = None if total.conv_weight is None else total.conv_weight.add_(cast(Tensor, part.conv_weight))
    return Gradients(total.norm_weight.add_(part.norm_weight), total.norm_bias.add_(part.norm_bias), weight)
