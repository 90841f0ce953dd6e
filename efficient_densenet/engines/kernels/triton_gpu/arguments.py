"""What launches of the Triton kernels have in common: how their arguments are made."""

import math
from typing import Any

import torch
from torch import Tensor

from ...shared.batch_norm import BatchNormAffine


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    with torch.cuda.device_of(arguments[0]):  # which need not be the current device
        kernel[grid](*arguments, **constants)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def divisibility(*sizes: int) -> int:
    """For DIVISIBILITY: up to eight numbers, 16 bytes of half precision, may be loaded at a time."""
    return math.gcd(8, *sizes)


def norm_vectors(norm: BatchNormAffine) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], bool]:
    """Weight, bias, mean and inv_std as kernels read them, and whether there is a mean: without, any other stands there
    and is not read."""
    weight, bias, inv_std = norm.weight.contiguous(), norm.bias.contiguous(), norm.inv_std.contiguous()
    return (weight, bias, inv_std if norm.mean is None else norm.mean.contiguous(), inv_std), norm.mean is not None


def with_contiguous_rows(matrix: Tensor) -> Tensor:
    """The kernels take a row stride, but contiguous channels."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def precision() -> str:
    """How PyTorch's setting for convolutions has float32 multiplied."""
    convolutions = getattr(torch.backends.cudnn, "conv", None)  # since PyTorch 2.9, which refuses mixed settings
    tf32 = torch.backends.cudnn.allow_tf32 if convolutions is None else convolutions.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"
