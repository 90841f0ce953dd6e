"""The matrix product with which the kernels for a dtype are compiled: the processor's fastest."""

import ctypes
import functools
import warnings
from typing import NamedTuple

import torch

from ..compiler.compilation import ARITHMETIC, Kernel, as_function
from ..compiler.processor import VARIABLE, has, is_found
from ..kernels.gemm import gemm, gemm_bfloat16
from ..kernels.gemm_amx import gemm_amx

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""The system call of x86-64, its operation `ARCH_REQ_XCOMP_PERM`, and the component of the processor's state."""


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


@functools.cache
def usable() -> bool:
    """Whether Linux permits the tile registers and a product by them is right. Warns once if not."""
    if not permitted():
        return _warn("Linux does not permit this process its tile registers")
    if not _is_right():
        return _warn("a product by its tile registers differs from that in float32")
    return True


def _warn(found: str) -> bool:
    warnings.warn(
        f"AMX cannot be used here: {found}. Products of bfloat16 take the processor's other instructions, which are "
        f"slower; {VARIABLE}=amx chooses them without this warning",
        stacklevel=2,
    )
    return False


def _is_right() -> bool:
    """Compare one product with edges in all dimensions with PyTorch's in float32."""
    m, n, k = 37, 48, 50
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator).bfloat16() for size in ((m, k), (k, n)))
    cells, c = b.view(k // 2, 2, n).transpose(1, 2).contiguous(), torch.empty(m, n)
    operands = a.data_ptr(), k // 2, 1, cells.data_ptr(), n, 0, c.data_ptr(), n
    as_function(gemm_amx, torch.float32)(m, n, k // 2, *operands, 0.0)
    with torch.autocast("cpu", enabled=False):  # this may run under autocast
        expected = a.float() @ b.float()
    return torch.allclose(c, expected, rtol=1e-3, atol=1e-3)


def permitted() -> bool:
    """Request the tile registers from Linux. Repeated requests are no error."""
    try:
        return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
    except (OSError, AttributeError):  # another system
        return False
