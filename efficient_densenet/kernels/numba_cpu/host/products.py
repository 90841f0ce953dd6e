"""The matrix product with which the kernels for a dtype are compiled: the processor's fastest."""

import functools
from typing import NamedTuple

import torch

from ..compiled.gemm import gemm, gemm_bfloat16
from ..compiled.gemm_amx import gemm_amx, usable
from .compilation import ARITHMETIC, Kernel
from .processor import has, is_found


class Product(NamedTuple):
    """The dtype of the operands in tiles and packed panels, and the GEMM."""

    operand: torch.dtype
    gemm: Kernel


@functools.cache
def product_of(dtype: torch.dtype) -> Product:
    """The product for matrices of this dtype. Sums are in the dtype of the arithmetic.

    Processors with AMX run AVX512-BF16 more slowly than float32 instructions (docs/benchmarks.md), so if AMX is not
    usable on them, operands are widened to float32.
    """
    if dtype is torch.bfloat16 and has("amx") and usable():
        return Product(torch.bfloat16, gemm_amx)
    if dtype is torch.bfloat16 and has("avx512_bf16") and not is_found("amx"):
        return Product(torch.bfloat16, gemm_bfloat16)
    return Product(ARITHMETIC[dtype], gemm)
