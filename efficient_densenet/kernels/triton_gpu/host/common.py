"""Code that the launches of the Triton kernels share: the layout of arguments, and the launches that finish kernels."""

import math
from typing import Any

import torch
from torch import Tensor

from ...activations import ActivationSpec
from ...convolution import precision
from ...interface import AffineInput, BatchNormAffine, Gradients, StatisticsOutput
from ..device import finishing_kernels, statistics_kernels
from . import launch, tiles

MAX_PROGRAM_INSTANCES = 2048
"""The most program instances of a launch: several for each multiprocessor of a large GPU, but few partial sums."""

_COMBINING_TILE = {"BLOCK_TILES": 128, "BLOCK_CHANNELS": 16}
_TALL_COMBINING_TILE = {"BLOCK_TILES": 1024, "BLOCK_CHANNELS": 4, "num_warps": 8}
"""The tile where many are combined: 12 channels take three program instances, each with an eighth of the loop."""

_FINISHING_TILE = {"BLOCK_SPLITS": 64, "BLOCK_COLUMNS": 32}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def divisibility(dtype: torch.dtype, *sizes: int) -> int:
    """The largest power of two that divides all sizes, at most the number of elements in 16 bytes, the widest load."""
    return math.gcd(16 // dtype.itemsize, *sizes)


def num_splits(num_rows: int, block_rows: int, other_tiles: int, programs: int, min_tiles: int = 1) -> int:
    """The number of program instances that share the tiles of rows: about `programs` in all, with `min_tiles` each."""
    return max(1, min(cdiv(cdiv(num_rows, block_rows), min_tiles), programs // other_tiles))


def product_precision(weight: Tensor) -> tiles.Precision:
    """The precision of products with this weight. PyTorch's setting for convolutions chooses it for float32, where the
    device has TF32; where it has none, Triton multiplies float16 without tensor cores too, as exact float32."""
    if not tiles.device_limits(weight.device).has_tf32:
        return tiles.Precision.IEEE
    if weight.dtype.itemsize < 4:
        return tiles.Precision.HALF
    return tiles.Precision.TF32 if precision() == "tf32" else tiles.Precision.IEEE


def norm_vectors(norm: BatchNormAffine) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], bool]:
    """Weight, bias, mean and inv_std as kernels read them, and whether there is a mean. If not, inv_std is passed in
    its place and is not read."""
    weight, bias, inv_std = norm.weight.contiguous(), norm.bias.contiguous(), norm.inv_std.contiguous()
    return (weight, bias, inv_std if norm.mean is None else norm.mean.contiguous(), inv_std), norm.mean is not None


def activation_constants(spec: ActivationSpec) -> dict[str, Any]:
    return {"ACTIVATION": spec.name, "A": spec.a, "B": spec.b}


def input_arguments(input: AffineInput) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Any]]:
    """The values and the norm's vectors as kernels read them, and the constants of the norm and the activation."""
    vectors, has_mean = norm_vectors(input.norm)
    constants = {"HAS_MEAN": has_mean, **activation_constants(input.activation)}
    return with_contiguous_rows(input.values), vectors, constants


def with_contiguous_rows(matrix: Tensor) -> Tensor:
    """`matrix`, or a copy if its channels are not contiguous. The kernels take any row stride."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def run(
    kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], constants: dict[str, Any], *tensors: Tensor
) -> None:
    """Launch the kernel with these arguments, tensors before numbers."""
    launch.launch(launch.Launch(kernel, grid, numbers, constants.copy()), *tensors)


def finish_backward(
    norm: BatchNormAffine,
    sums: Tensor | None,
    partial_sums: Tensor,
    conv_weight: Tensor | None = None,
    partial_conv_weight: Tensor | None = None,
    taps: int = 1,
) -> Gradients:
    """The norm's gradients from partial sums (splits, 2, channels); they are also added to an accumulator's `sums`.

    The partial sums of a weight's gradient, (splits, out_channels, taps, channels), are added up into `conv_weight`,
    (out_channels, channels, taps), if it is given.
    """
    splits, _, channels = partial_sums.shape
    grads = Gradients(partial_sums.new_empty(channels), partial_sums.new_empty(channels), conv_weight)
    (weight, _, mean, inv_std), has_mean = norm_vectors(norm)
    # Another tensor, which the kernel does not read, takes the place of an absent one.
    conv_weight_or_any, sums_or_any, partial_conv_weight_or_any = (
        partial_sums if each is None else each for each in (conv_weight, sums, partial_conv_weight)
    )
    outputs = grads.norm_bias, grads.norm_weight, conv_weight_or_any, sums_or_any
    inputs = partial_sums, partial_conv_weight_or_any, weight, mean, inv_std
    num_weights = 0 if conv_weight is None else conv_weight.numel()
    weight_splits = 0 if partial_conv_weight is None else partial_conv_weight.shape[0]
    sizes = splits, weight_splits, channels, num_weights, 0 if sums is None else sums.stride(0)
    constants = {"HAS_MEAN": has_mean, "HAS_SUMS": sums is not None, "HAS_GRAD_WEIGHT": conv_weight is not None}
    columns = _FINISHING_TILE["BLOCK_COLUMNS"]
    grid = (cdiv(channels, columns) + cdiv(num_weights, columns),)
    constants |= {"TAPS": taps, **_FINISHING_TILE}
    run(finishing_kernels.finish_backward, grid, sizes, constants, *outputs, *inputs)
    return grads


def combine_statistics(stats: Tensor, block_rows: int, num_rows: int, statistics: StatisticsOutput) -> None:
    """The statistics of all rows, from `stats` (tiles, 2, channels) of tiles of `block_rows` rows."""
    num_tiles, _, channels = stats.shape
    blocks = _TALL_COMBINING_TILE if num_tiles > _COMBINING_TILE["BLOCK_TILES"] else _COMBINING_TILE
    numbers = statistics.eps, num_rows, channels, statistics.matrix.stride(0), block_rows
    grid = (cdiv(channels, blocks["BLOCK_CHANNELS"]),)
    run(statistics_kernels.combine_statistics, grid, numbers, blocks, statistics.matrix, stats)
