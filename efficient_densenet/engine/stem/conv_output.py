"""The convolution's output, stored in full, and the tiles in which everything else is computed."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..._tensors import memory_format_of
from ...kernels import scratch
from ...kernels.portable import to_spatial
from ...kernels.row_tiles import TILE_BYTES
from ..refuse import convolved_size
from .spec import StemSpec

Tile = tuple[slice, slice]
"""Images, and channels of them."""


class ConvOutput:
    """z = conv(x), (N, out_channels, *spatial), and what it was computed from.

    `memory_format` is that of z. A tile is as many images as `TILE_BYTES` hold in the accumulation dtype, at least one;
    of one image that is too large, as many channels, at least one.
    """

    def __init__(self, spec: StemSpec, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.spec, self.x, self.weight = spec, x.to(spec.torch_dtype), weight.to(spec.torch_dtype)
        self.bias = None if bias is None else bias.to(spec.torch_dtype)
        self.spatial_size = convolved_size(x.shape[2:], weight.shape[2:], *spec.conv[:3])
        self.reduced_dims = [0, *range(2, x.dim())]  # all but the channels
        self.values = self._convolve()
        self.memory_format = memory_format_of(self.values)

    @property
    def count(self) -> int:
        """How many values a channel has."""
        return self.values.numel() // self.values.shape[1]

    def _convolve(self) -> Tensor:
        """z, computed some images at a time: a convolution's own workspace may be as large as its output."""
        values = None
        for images in self.image_tiles():
            part = self.spec.conv.forward(self.x[images], self.weight, self.bias)
            if len(part) == len(self.x):
                return part
            values = self.new_empty(part, part.dtype, memory_format_of(part)) if values is None else values
            values[images] = part
        assert values is not None  # there is an image
        return values

    def image_tiles(self) -> Iterator[slice]:
        return _slices(len(self.x), self._channels_per_tile() // len(self.weight))

    def tiles(self) -> Iterator[Tile]:
        for images in self.image_tiles():
            yield from self.tiles_of(images)

    def tiles_of(self, images: slice) -> Iterator[Tile]:
        """The tiles of one of `image_tiles`: one, unless a single image is too large."""
        for channels in _slices(len(self.weight), self._channels_per_tile()):
            yield images, channels

    def _channels_per_tile(self) -> int:
        tile_bytes = TILE_BYTES["cpu" if self.x.device.type == "cpu" else "cuda"]
        return tile_bytes // (self.spatial_size.numel() * self.spec.accumulation_dtype.itemsize)

    def centered(self, tile: Tile, mean: Tensor, memory_format: torch.memory_format) -> Tensor:
        """z − mean in the accumulation dtype, in scratch."""
        values = self.values[tile]
        if memory_format is torch.contiguous_format:
            buffer = scratch.take("centered_tile", values.shape, mean.dtype, mean.device)
        else:
            matrix_shape = values.numel() // values.shape[1], values.shape[1]
            matrix = scratch.take("centered_tile", matrix_shape, mean.dtype, mean.device)
            buffer = to_spatial(matrix, torch.Size([values.shape[0], *values.shape[2:]]))
        return torch.sub(values, self.by_channel(mean, tile), out=buffer)

    def by_channel(self, vector: Tensor, tile: Tile) -> Tensor:
        """(channels,) to the tile's channels, (channels, 1, …), which broadcasts with (N, channels, *spatial)."""
        return vector[tile[1]].view(-1, *[1] * (self.x.dim() - 2))

    def new_empty(self, part: Tensor, dtype: torch.dtype, memory_format: torch.memory_format | None = None) -> Tensor:
        """A buffer for all images and channels, of the spatial size of a tile's `part`."""
        shape = len(self.x), len(self.weight), *part.shape[2:]
        memory_format = memory_format or self.memory_format
        return torch.empty(shape, dtype=dtype, device=part.device, memory_format=memory_format)


def _slices(count: int, step: int) -> Iterator[slice]:
    step = max(1, step)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
