"""The backward of a stem, given its recomputed convolution output; the package's docstring has the formulas."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.interface import BatchNormAffine
from ...norms.sync_batch_norm import SyncGroup
from ..stage import synchronized as batch_norm
from .conv_output import ConvOutput, Tile
from .forward import pooled_tile


class StemBackward:
    """Two passes over the tiles: the sums of the norm's backward, then the gradient of each tile.

    `needs_grad` is of x, norm.weight, norm.bias, conv.weight and, if there is one, conv.bias.
    """

    def __init__(
        self,
        conv_output: ConvOutput,
        mean: Tensor,
        norm: BatchNormAffine,
        count: int | Tensor,
        needs_grad: Sequence[bool],
    ) -> None:
        self.conv_output, self.spec = conv_output, conv_output.spec
        self.mean, self.norm, self.count = mean, norm, count
        self.needs_grad_input, _, _, *self.needs_conv_grads = needs_grad
        self.indices: Tensor | None = None

    def run(self, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x and of each parameter, in the order of `needs_grad`."""
        grad_weight, grad_bias = self._norm_gradients(grad_output)
        grad_input, *conv_grads = [None] * (1 + len(self.needs_conv_grads))
        if self.needs_grad_input or any(self.needs_conv_grads):
            grad_input, *conv_grads = self._conv_gradients(grad_output, grad_weight, grad_bias)
        return grad_input, grad_weight, grad_bias, *conv_grads

    def _norm_gradients(self, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """First pass: Σ g and Σ g · (z − mean), summed over the maxima only. Stores their indices, −1 if inactive."""
        conv_output, memory_format = self.conv_output, self.conv_output.memory_format
        grad_sum, product_sum = torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        for tile in conv_output.tiles():
            maxima, indices = pooled_tile(conv_output, tile, self.mean, self.norm)
            maxima = maxima.contiguous(memory_format=memory_format)
            indices = indices.contiguous(memory_format=memory_format)
            inactive = maxima <= 0
            grad = grad_output[tile].to(self.mean.dtype).masked_fill(inactive, 0)
            values = conv_output.values[tile].flatten(2).gather(2, indices.flatten(2)).view_as(indices)
            centered = values - conv_output.by_channel(self.mean, tile)
            grad_sum[tile[1]] += grad.sum(conv_output.reduced_dims)
            product_sum[tile[1]] += centered.mul_(grad).sum(conv_output.reduced_dims)
            if self.indices is None:
                self.indices = conv_output.new_empty(indices, torch.int32)
            self.indices[tile] = indices.masked_fill_(inactive, -1)
        return self.norm.grad_weight(grad_sum, product_sum), grad_sum

    def _conv_gradients(self, grad_output: Tensor, *norm_grads: Tensor) -> list[Tensor | None]:
        """Second pass: grad_input, grad_weight and grad_bias of the convolution."""
        conv_output, values = self.conv_output, self.conv_output.values
        scale, shift, grad_scale = self._coefficients(*norm_grads)
        output_mask = [self.needs_grad_input, *self.needs_conv_grads, False][:3]
        grad_input = torch.empty_like(conv_output.x) if self.needs_grad_input else None
        sums: list[Tensor | None] = []
        for images in conv_output.image_tiles():
            for tile in conv_output.tiles_of(images):
                # This overwrites the tile's z, which is not read again.
                values[tile] = self._grad_conv_output(tile, grad_output[tile], scale, shift, grad_scale)
            grad_of_images, *partial_sums = self.spec.conv.backward(
                values[images], conv_output.x[images], conv_output.weight, output_mask
            )
            if grad_input is not None and grad_of_images is not None:
                grad_input[images] = grad_of_images
            sums = self._add_partial_sums(sums, partial_sums[: len(self.needs_conv_grads)])
        return [grad_input, *sums]

    def _coefficients(self, grad_weight: Tensor, grad_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `_grad_conv_output` takes."""
        norm = self.norm
        if self.spec.frozen:
            zeros = torch.zeros_like(norm.scale)
            return zeros, zeros, norm.scale
        weight = norm.grad_scale
        sums, group = weight * torch.stack([grad_bias, grad_weight]), SyncGroup.named(self.spec.sync_group)
        # The values and their gradient are placeholders here: `_grad_conv_output` scatters a tile's g when it needs it.
        placeholder = self.conv_output.values
        vectors = norm.inv_std, norm.mean
        grad = batch_norm.batch_norm_backward(placeholder, placeholder, vectors, sums, self.count, group)
        slope, constant, inv_std = grad.coefficients()
        return slope, constant, inv_std * weight

    def _grad_conv_output(self, tile: Tile, grad_output: Tensor, *vectors: Tensor) -> Tensor:
        """grad_z = scale · (z − mean) + shift + grad_scale · g, with g = grad_output scattered to the maxima."""
        assert self.indices is not None  # the first pass has stored them
        scale, shift, grad_scale = (self.conv_output.by_channel(vector, tile) for vector in vectors)
        centered = self.conv_output.centered(tile, self.mean, self.conv_output.memory_format)
        grad = self._max_pool_backward(grad_output, self.indices[tile].long(), centered)
        return grad.mul_(grad_scale).addcmul_(centered, scale).add_(shift)

    def _max_pool_backward(self, grad_output: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        grad_output = grad_output.to(values.dtype).masked_fill(indices < 0, 0)
        return self.spec.pool.backward(grad_output, indices.clamp_min_(0), values)

    def _add_partial_sums(
        self, sums: list[Tensor | None], partial_sums: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The sums over the tiles of images so far, in the accumulation dtype; there are none before the first."""
        partial_sums = [None if partial is None else partial.to(self.mean.dtype) for partial in partial_sums]
        if not sums:
            return partial_sums
        for total, partial in zip(sums, partial_sums, strict=True):
            if total is not None and partial is not None:
                total.add_(partial)
        return sums
