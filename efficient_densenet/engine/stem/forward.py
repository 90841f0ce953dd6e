"""The convolution of a stem, and the stem's forward: statistics, normalization, activation and max pooling."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._tensors import as_dtype, device_type, memory_format_of
from ...kernels import kernels_for
from ...kernels.interface import INV_STD, MEAN, VARIANCE, AffineInput, BatchNormAffine, StatisticsOutput
from ...kernels.row_tiles import slices
from ...norms.sync_batch_norm import SyncGroup
from ..limits import convolved_size
from ..stage.statistics import synchronize_statistics
from .spec import StemSpec


class Convolved:
    """The inputs of a stem's convolution in its dtype, and its output z = conv(x), (N, out_channels, *spatial).

    On a CPU contiguous images of half precision are convolved in float32, one at a time. In bfloat16 oneDNN copies them
    for each thread, with 16 channels each, where it has AMX: that took up to ten times the memory.
    """

    def __init__(self, spec: StemSpec, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        dtype = spec.torch_dtype
        self.spec, self.x = spec, x.to(dtype)
        self.kernels = kernels_for(self.x, activations=[spec.activation.name])
        size = convolved_size(x.shape[2:], weight.shape[2:], *spec.conv[:3])
        shape = torch.Size([len(x), len(weight), *size])
        is_half_on_cpu = dtype.itemsize == 2 and device_type(x) == "cpu"
        in_float32 = is_half_on_cpu and memory_format_of(self.x) is torch.contiguous_format
        self.conv_dtype = torch.float32 if in_float32 else dtype
        self.weight = weight.to(dtype).to(self.conv_dtype)
        self.image_tiles = slices(len(x), 1 if in_float32 else self.kernels.images_at_once(self.x, shape), x)
        self.values = self._convolve(shape, None if bias is None else bias.to(dtype).to(self.conv_dtype))
        self.count = self.values.numel() // len(weight)

    def _convolve(self, shape: torch.Size, bias: Tensor | None) -> Tensor:
        values = None
        for images in self.image_tiles:
            part = self.spec.conv.forward(as_dtype(self.x[images], self.conv_dtype), self.weight, bias)
            part = as_dtype(part, self.x.dtype)
            if len(part) == len(self.x):
                return part.contiguous(memory_format=memory_format_of(part))
            if values is None:
                values = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=memory_format_of(part))
            values[images] = part
            del part  # before the next is allocated
        assert values is not None  # there is a tile
        return values

    def gradients(self, needs_grad_input: bool, needs_grad_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        """grad_input and grad_weight of the convolution, whose grad_output is in `values`, in its dtype, for as many
        images at a time as in its forward."""
        x, tiles, output_mask = self.x, self.image_tiles, [needs_grad_input, needs_grad_weight, False]
        grad_input = torch.empty_like(x) if needs_grad_input and len(tiles) > 1 else None
        grad_weight = None
        for images in tiles:
            grad_output, part = (as_dtype(each[images], self.conv_dtype) for each in (self.values, x))
            grad_of_images, partial, _ = self.spec.conv.backward(grad_output, part, self.weight, output_mask)
            if grad_input is not None and grad_of_images is not None:
                grad_input[images] = grad_of_images
            elif grad_of_images is not None:
                grad_input = as_dtype(grad_of_images, x.dtype)
            if partial is not None:
                partial = as_dtype(partial, self.spec.accumulation_dtype)
                grad_weight = partial if grad_weight is None else grad_weight.add_(partial)
        return grad_input, grad_weight

    def norm_input(self, weight: Tensor, bias: Tensor, statistics: Tensor) -> AffineInput:
        """z with the norm and the activation after it."""
        norm = BatchNormAffine(weight, bias, statistics[INV_STD], statistics[MEAN], self.spec.frozen)
        return AffineInput(self.values, norm, self.spec.activation)


def forward(
    convolved: Convolved,
    norm_weight: Tensor,
    norm_bias: Tensor,
    running_statistics: Sequence[Tensor],
) -> list[Tensor]:
    """The output, the matrix of statistics and, in a sync group, the number of values per channel.

    A frozen norm has running statistics, which are copied: the buffers may change before the backward.
    """
    spec, values, count = convolved.spec, convolved.values, convolved.count
    matrix = values.new_empty(3, values.shape[1], dtype=spec.accumulation_dtype)
    statistics = StatisticsOutput(matrix, spec.eps)
    if running_statistics:
        mean, variance = (each.to(matrix.dtype) for each in running_statistics)
        torch.stack([mean, torch.zeros_like(mean), torch.rsqrt(variance + spec.eps)], out=matrix)
    else:
        convolved.kernels.image_statistics(values, statistics)
        count = synchronize_statistics(statistics, count, SyncGroup.named(spec.sync_group))
        matrix[VARIANCE].mul_(count / (count - 1))
    input, dtype = convolved.norm_input(norm_weight, norm_bias, matrix), getattr(torch, spec.output_dtype)
    output = convolved.kernels.norm_activation_max_pool(input, spec.pool, dtype)
    return [output, matrix, *([count] if isinstance(count, Tensor) else [])]
