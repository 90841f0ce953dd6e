"""A model of AMX's tile registers for processors without them: `gemm_amx.make_gemm` takes it instead of `amx`.

One set of registers: for one thread.
"""

import types

import numpy as np

from efficient_densenet.kernels.numba_cpu.compiler.intrinsics import compiled
from efficient_densenet.kernels.numba_cpu.kernels.memory import elements

_REGISTERS = np.zeros(8 * 16 * 16, np.float32)
_registers_at = _REGISTERS.ctypes.data


@compiled
def _register(tile):
    return elements(_registers_at + tile * 1024, 0, 256, np.float32(0))


@compiled
def configure():
    registers = elements(_registers_at, 0, 8 * 256, np.float32(0))
    for i in range(len(registers)):
        registers[i] = 0


@compiled
def release():
    pass


@compiled
def clear(tile):
    register = _register(tile)
    for i in range(256):
        register[i] = 0


@compiled
def load(tile, address, stride):
    register = _register(tile)
    for i in range(16):
        row = elements(address + i * stride, 0, 16, np.float32(0))
        for j in range(16):
            register[16 * i + j] = row[j]


@compiled
def store(tile, address, stride):
    register = _register(tile)
    for i in range(16):
        row = elements(address + i * stride, 0, 16, np.float32(0))
        for j in range(16):
            row[j] = register[16 * i + j]


@compiled
def multiply_add(sums, a, b):
    """Two sums in float32, of the first and of the second of each pair, which are added at the end."""
    totals = _register(sums)
    a_pairs = elements(_registers_at + a * 1024, 0, 512, np.uint16(0))
    b_pairs = elements(_registers_at + b * 1024, 0, 512, np.uint16(0))
    for i in range(16):
        for j in range(16):
            first = second = np.float32(0)
            for k in range(16):
                first += a_pairs[32 * i + 2 * k] * np.float32(1) * b_pairs[32 * k + 2 * j]
                second += a_pairs[32 * i + 2 * k + 1] * np.float32(1) * b_pairs[32 * k + 2 * j + 1]
            totals[16 * i + j] += first + second


TILES = types.SimpleNamespace(
    configure=configure, release=release, clear=clear, load=load, store=store, multiply_add=multiply_add
)
