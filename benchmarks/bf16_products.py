"""The rate of bfloat16 products on one thread of a processor: ours by each instruction set, PyTorch's, the hardware's.

    python benchmarks/bf16_products.py

The operands of ours lie as the engine's kernels have them: rows of A, packed panels of B, in the caches. Writes a CSV
file to benchmarks/results with a row for each size.
"""

import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from options import run_command

from efficient_densenet.engines.kernels.numba_cpu import amx, gemm, gemm_amx, processor
from efficient_densenet.engines.kernels.numba_cpu.compilation import compile_kernel

RESULTS = Path(__file__).parent / "results"
SIZES = {
    "densenet_bc_100_12": [(48, 1024, 150), (48, 1024, 300), (12, 1024, 432)],
    "densenet121": [(128, 3136, 256), (128, 784, 512), (32, 784, 1152)],
}
"""m, n, k: channels of the output, pixels, and channels (× 9 taps) that are summed."""

GEMMS = {"avx512_bf16": gemm.gemm_bfloat16, "amx": gemm_amx.gemm_amx}
_TILE_FLOP = 2 * 16 * 16 * 32


def measure(rounds: int = 15) -> None:
    """Measure all sizes, print them in GFLOP/s, and write a CSV file.

    Args:
        rounds: number of timed repetitions; the median counts.
    """
    names = [name for name in GEMMS if processor.has(name) and (name != "amx" or gemm_amx.usable())]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = round(_rate(_multiply_tiles, 4 * 100_000 * _TILE_FLOP, rounds)) if "amx" in names else ""
        measured = [
            {"model": model, "m": m, "n": n, "k": k}
            | {name: _rate_of_gemm(name, m, n, k, rounds) for name in names}
            | {"pytorch": _rate_of_pytorch(m, n, k, rounds), "tile_multiplies_alone": alone}
            for model, sizes in SIZES.items()
            for m, n, k in sizes
        ]
    finally:
        torch.set_num_threads(threads)
    path = RESULTS / f"bf16_products_torch{torch.__version__.split('+')[0]}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(measured[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(measured)
    for row in measured:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(f"wrote {path}")


def _rate(function: Callable[[], Any], flop: int, rounds: int) -> float:
    """GFLOP/s in the median, after a first call that compiles."""
    function()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return flop / statistics.median(seconds) / 1e9


def _rate_of_gemm(name: str, m: int, n: int, k: int, rounds: int, repeats: int = 5) -> int:
    product = compile_kernel(GEMMS[name], torch.float32).ctypes
    a, panels, c = torch.randn(m, k).bfloat16(), torch.randn(n // 16, k // 2, 16, 2).bfloat16(), torch.empty(m, n)
    operands = a.data_ptr(), k // 2, 1, panels.data_ptr(), 0, 0, c.data_ptr(), n, 0.0

    def run() -> None:
        for _ in range(repeats):
            product(m, n, k // 2, *operands)

    return round(_rate(run, repeats * 2 * m * n * k, rounds))


def _rate_of_pytorch(m: int, n: int, k: int, rounds: int, repeats: int = 5) -> int:
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    return round(_rate(lambda: [a @ b for _ in range(repeats)], repeats * 2 * m * n * k, rounds))


@numba.njit
def _multiply_tiles():
    """What the hardware reaches where nothing is loaded or stored: four independent sums."""
    amx.configure()
    amx.clear(0)
    amx.clear(1)
    amx.clear(2)
    amx.clear(3)
    amx.clear(4)
    amx.clear(5)
    for _ in range(100_000):
        amx.multiply_add(0, 4, 5)
        amx.multiply_add(1, 4, 5)
        amx.multiply_add(2, 4, 5)
        amx.multiply_add(3, 4, 5)
    amx.release()


if __name__ == "__main__":
    run_command(measure)
