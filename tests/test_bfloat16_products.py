"""The GEMMs, in float32, float64 and of bfloat16 pairs, by AVX512-BF16 and by AMX, and which one a processor gets."""

import functools
import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from grids import pairwise
from helpers import kernel_modules

from efficient_densenet.kernels.numba_cpu.host import openmp

numba = pytest.importorskip("numba", reason="the kernels are compiled by Numba")
if not openmp.available():
    pytest.skip("this PyTorch has no GNU OpenMP threads", allow_module_level=True)
amx, gemm, gemm_amx, memory, micro_kernel, processor, launch = kernel_modules(
    "numba_cpu", "amx", "gemm", "gemm_amx", "memory", "micro_kernel", "processor", "launch"
)
import amx_model  # noqa: E402  (it needs Numba)

SIZES = [*itertools.product([1, 16, 33], [1, 16, 40, 112], [1, 7, 37]), (192, 48, 12), (96, 33, 300)]


@functools.cache
def _compiled(name: str):
    if name == "avx512_bf16":
        product = gemm.make_gemm(avx512=True, pairs=True)
    else:
        has_amx = processor.has("amx") and launch.permits_amx()
        product = gemm_amx.make_gemm(amx if has_amx else amx_model.TILES)
    return numba.njit(lambda *arguments: product(*arguments))


@pytest.fixture
def product(request):
    if request.param == "avx512_bf16" and not processor.has(request.param):
        pytest.skip(f"this processor has no {request.param}")
    return _compiled(request.param)


def _packed(b: torch.Tensor) -> torch.Tensor:
    """Panels of 16 columns of cells (k, n), padded with zeros."""
    padded = torch.nn.functional.pad(b, (0, -b.shape[1] % 16))
    return padded.view(len(b), -1, 16).transpose(0, 1).contiguous()


def _with_slack(tensor: torch.Tensor, fill: float) -> torch.Tensor:
    """The same tensor in memory that goes on after it with other numbers."""
    memory = torch.full((tensor.numel() + 24 * 64,), fill, dtype=tensor.dtype)
    return memory[: tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    *pairwise(transposed=[False, True], packed=[False, True], accumulate=[False, True], product=["avx512_bf16", "amx"]),
    indirect=["product"],
)
def test_products_of_any_size(product, transposed, packed, accumulate):
    """Beyond the operands lies NaN, and beyond C what must stay. A model of AMX stands in where there is none."""
    for m, n, cells in SIZES:
        torch.manual_seed(m + n + cells)
        a, b = torch.randn(m, cells, 2).bfloat16(), torch.randn(cells, n, 2).bfloat16()
        exact = a.double().flatten(1) @ b.double().transpose(1, 2).flatten(0, 1)
        cells_of_a, cells_of_b = (each.contiguous().view(torch.float32).squeeze(-1) for each in (a, b))
        columns = -(-n // 16) * 16
        a_memory = _with_slack(cells_of_a.T if transposed else cells_of_a, torch.nan)
        b_memory = torch.nn.functional.pad(cells_of_b, (0, columns - n), value=torch.nan)
        b_memory = _with_slack(_packed(cells_of_b) if packed else b_memory, torch.nan)
        c = torch.randn(m + 1, n + 3)
        expected, start = c.clone(), c[:m, :n].double() if accumulate else 0
        strides = (1, m) if transposed else (cells, 1)
        operands = a_memory.data_ptr(), *strides, b_memory.data_ptr(), 0 if packed else columns, accumulate
        product(m, n, cells, *operands, c.data_ptr(), n + 3, np.float32(0))
        assert torch.allclose(c[:m, :n].double(), start + exact, rtol=1e-4, atol=1e-4 * cells**0.5), (m, n, cells)
        expected[:m, :n] = c[:m, :n]
        assert torch.equal(c, expected), (m, n, cells)


@pytest.mark.parametrize("avx512", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.exhaustive)])
def test_products_in_float32_and_float64(avx512, dtype):
    gemm_function = gemm.make_gemm(avx512)
    product, zero = numba.njit(lambda *arguments: gemm_function(*arguments)), torch.zeros(1, dtype=dtype).numpy()[0]
    panel = memory.PANEL_BYTES // dtype.itemsize
    extra_rows = math.lcm(*micro_kernel.register_blocks(avx512).values())
    widths = [1, *(panels * panel + extra for panels in range(1, 8) for extra in (-3, 0))]
    for case, n in enumerate(widths * 2):
        torch.manual_seed(case)
        m, k, transposed, packed, accumulate = (int(torch.randint(high, ())) for high in (110, 300, 2, 2, 2))
        m, k, panels = m + 1, k + 1, -(-n // panel)
        a, b = torch.randn(m + extra_rows, k, dtype=dtype), torch.randn(k, panels * panel, dtype=dtype)
        c = torch.randn(m + extra_rows, n + 5, dtype=dtype)
        expected = c.double()
        expected[:m, :n] *= accumulate
        expected[:m, :n] += a[:m].double() @ b[:, :n].double()
        stored_a = a.T.contiguous() if transposed else a
        stored_b = b.view(k, panels, panel).transpose(0, 1).contiguous() if packed else b
        a_strides = (1, len(a)) if transposed else (k, 1)
        operands = stored_a.data_ptr(), *a_strides, stored_b.data_ptr(), 0 if packed else b.shape[1]
        product(m, n, k, *operands, bool(accumulate), c.data_ptr(), n + 5, zero)
        bound = 4 * torch.finfo(dtype).eps * (k + 1) ** 0.5
        assert (c - expected).abs().max() <= bound * max(1, expected.abs().max()), (case, n)


def _run(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.fixture
def features(monkeypatch):
    """What the processor has, as each test says."""

    def set_features(*names: str) -> None:
        monkeypatch.setattr(processor, "_found", lambda: set(names))

    monkeypatch.delenv(processor.VARIABLE, raising=False)
    cached = launch.product_of, processor._left_out
    for each in cached:
        each.cache_clear()
    yield set_features
    for each in cached:
        each.cache_clear()


AVX512, AMX = ("avx512f", "avx512bf16"), ("amx-tile", "amx-bf16")


@pytest.mark.parametrize(
    ("found", "left_out", "name"),
    [
        ((*AVX512, *AMX), "", "gemm_amx"),
        ((*AVX512, *AMX), "amx", "gemm"),
        ((*AVX512, *AMX), "avx512", "gemm"),
        ((*AVX512, *AMX), "amx, avx512_bf16", "gemm"),
        (AVX512, "", "gemm_bfloat16"),
        (("avx512f",), "", "gemm"),
        (AMX, "", "gemm"),
        ((), "avx512", "gemm"),
    ],
)
def test_the_fastest_product_that_the_processor_has_and_the_user_wants(monkeypatch, features, found, left_out, name):
    features(*found)
    monkeypatch.setenv(processor.VARIABLE, left_out)
    monkeypatch.setattr(launch, "permits_amx", lambda: True)
    product = launch.product_of(torch.bfloat16)
    assert product.gemm.function.__name__ == name
    assert product.operand is (torch.float32 if name == "gemm" else torch.bfloat16)
    for dtype in (torch.float32, torch.float64):
        assert launch.product_of(dtype) == (dtype, gemm.gemm)


PRODUCT = """
import torch
from efficient_densenet.kernels.numba_cpu.host import launch
from efficient_densenet.kernels.numba_cpu.compiler.compilation import compile_kernel
product = launch.product_of(torch.bfloat16)
compile_kernel(product.gemm, torch.float32)
print(product.gemm.function.__name__)
"""


@pytest.mark.exhaustive
def test_products_are_those_of_the_target_that_numba_compiles_for(tmp_path):
    """LLVM ends the process that asks for others."""
    target = {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    assert _run(PRODUCT, target).stdout.split() == ["gemm"]


@pytest.mark.usefixtures("features")
def test_an_unknown_feature_is_named(monkeypatch):
    monkeypatch.setenv(processor.VARIABLE, "avx512,sse9")
    with pytest.raises(ValueError, match="found sse9; needed are names among avx512, avx512_bf16, amx, separated by"):
        processor.has("avx512")


def test_amx_is_not_used_where_linux_does_not_permit_it(monkeypatch, features):
    features(*AVX512, *AMX)
    monkeypatch.setattr(launch, "permits_amx", lambda: False)
    assert launch.product_of(torch.bfloat16) == (torch.float32, gemm.gemm)
