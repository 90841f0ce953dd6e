"""The rate of matrix products on one thread of a processor: ours by each instruction set, PyTorch's, the hardware's.

    python benchmarks/bf16_products.py

Ours multiply as the engine's kernels do: rows of pixels by the packed panels of a weight, in the caches. Writes a CSV
file to benchmarks/results with a row for each size, in GFLOP/s.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import rows
import torch
from options import run_command
from worker import device_name

from efficient_densenet.kernels.numba_cpu.compiled import amx, gemm, gemm_amx
from efficient_densenet.kernels.numba_cpu.host import processor
from efficient_densenet.kernels.numba_cpu.host.compilation import compile_kernel

SIZES = {
    "densenet_bc_100_12": [(1024, 48, 150), (1024, 48, 300), (1024, 108, 48)],
    "densenet121": [(784, 128, 256), (784, 128, 512), (784, 288, 128)],
}
"""m, n, k: pixels, columns of the weight, and channels that are summed. Each model's last is a 3×3 convolution."""

GEMMS = {"avx512": gemm.gemm, "avx512_bf16": gemm.gemm_bfloat16, "amx": gemm_amx.gemm_amx}
"""Of float32 numbers by the first, of pairs of bfloat16s by the others."""

_TILE_FLOP = 2 * 16 * 16 * 32
_TILES = 4 * 100_000
_PANEL = 16


def measure(rounds: int = 15) -> None:
    """Measure all sizes, print them, and write a CSV file.

    Args:
        rounds: number of timed repetitions; the median counts.
    """
    names = [name for name in GEMMS if processor.has(name) and (name != "amx" or gemm_amx.usable())]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        hardware = _rates_of_tiles(rounds) if "amx" in names else {}
        measured = [
            {"model": model, "m": m, "n": n, "k": k}
            | {name: _rate_of_gemm(name, m, n, k, rounds) for name in names}
            | {"pytorch_bf16": _rate_of_pytorch(m, n, k, rounds)}
            | hardware
            | _provenance(rounds)
            for model, sizes in SIZES.items()
            for m, n, k in sizes
        ]
    finally:
        torch.set_num_threads(threads)
    for row in measured:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    rows.write(rows.RESULTS / f"bf16_products_torch{torch.__version__.split('+')[0]}.csv", measured)


def _provenance(rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "device_name": device_name(torch.device("cpu")),
        **rows.provenance(),
    }


def _rate(function: Callable[[], Any], flop: int, rounds: int) -> int:
    """GFLOP/s in the median, after a first call that compiles."""
    function()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return round(flop / statistics.median(seconds) / 1e9)


def _rate_of_gemm(name: str, m: int, n: int, k: int, rounds: int, repeats: int = 5) -> int:
    product = compile_kernel(GEMMS[name], torch.float32).ctypes
    dtype, cells = (torch.float32, k) if name == "avx512" else (torch.bfloat16, k // 2)
    panels = torch.randn(-(-n // _PANEL), cells, _PANEL, k // cells).to(dtype)
    a, c = torch.randn(m, k).to(dtype), torch.empty(m, n)
    operands = a.data_ptr(), cells, 1, panels.data_ptr(), 0, 0, c.data_ptr(), n, 0.0

    def run() -> None:
        for _ in range(repeats):
            product(m, n, cells, *operands)

    return _rate(run, repeats * 2 * m * n * k, rounds)


def _rate_of_pytorch(m: int, n: int, k: int, rounds: int, repeats: int = 5) -> int:
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    return _rate(lambda: [a @ b for _ in range(repeats)], repeats * 2 * m * n * k, rounds)


def _rates_of_tiles(rounds: int) -> dict[str, int]:
    """What the hardware reaches with four sums: multiply instructions alone, and with loads of their operands.

    The rows of a tile, 64 bytes, are cache lines or lie across two.
    """
    memory = np.zeros(6 * 1024, np.uint8)
    aligned, flop = memory.ctypes.data + -memory.ctypes.data % 64, _TILES * _TILE_FLOP
    return {
        "tiles_multiplied": _rate(lambda: _multiply_tiles(aligned, False), flop, rounds),
        "tiles_loaded": _rate(lambda: _multiply_tiles(aligned, True), flop, rounds),
        "tiles_loaded_across_lines": _rate(lambda: _multiply_tiles(aligned + 16, True), flop, rounds),
    }


@numba.njit
def _multiply_tiles(address, loads):
    amx.configure()
    amx.clear(0)
    amx.clear(1)
    amx.clear(2)
    amx.clear(3)
    amx.load(4, address, 64)
    amx.load(5, address + 1024, 64)
    amx.load(6, address + 2048, 64)
    amx.load(7, address + 3072, 64)
    for _ in range(_TILES // 4):
        if loads:
            amx.load(4, address, 64)
            amx.load(6, address + 2048, 64)
        amx.multiply_add(0, 4, 6)
        if loads:
            amx.load(7, address + 3072, 64)
        amx.multiply_add(1, 4, 7)
        if loads:
            amx.load(5, address + 1024, 64)
        amx.multiply_add(2, 5, 6)
        amx.multiply_add(3, 5, 7)
    amx.release()


if __name__ == "__main__":
    run_command(measure)
