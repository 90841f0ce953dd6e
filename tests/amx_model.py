"""A model of AMX's tile registers for processors without them: `gemm_amx.make_gemm` takes it instead of `amx`.

One set of registers: for one thread. What the architecture forbids, to use registers that are not configured and to
leave some configured twice, is counted.
"""

import types

import numpy as np

from efficient_densenet.kernels.numba_cpu.compiler.intrinsics import compiled
from efficient_densenet.kernels.numba_cpu.kernels.memory import elements

_REGISTERS, _STATE = np.zeros(8 * 16 * 16, np.float32), np.zeros(2, np.int64)
_CONFIGURED, _FAULTS = 0, 1
_registers_at, _state_at = _REGISTERS.ctypes.data, _STATE.ctypes.data


@compiled
def _register(tile):
    state = elements(_state_at, 0, 2, np.int64(0))
    if not state[_CONFIGURED]:
        state[_FAULTS] += 1
    return elements(_registers_at + tile * 1024, 0, 256, np.float32(0))


@compiled
def configure():
    state = elements(_state_at, 0, 2, np.int64(0))
    if state[_CONFIGURED]:
        state[_FAULTS] += 1
    state[_CONFIGURED] = 1
    registers = elements(_registers_at, 0, 8 * 256, np.float32(0))
    for i in range(len(registers)):
        registers[i] = 0


@compiled
def release():
    elements(_state_at, 0, 2, np.int64(0))[_CONFIGURED] = 0


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
    _register(a), _register(b)
    of_a = elements(_registers_at + a * 1024, 0, 512, np.uint16(0))
    of_b = elements(_registers_at + b * 1024, 0, 512, np.uint16(0))
    for i in range(16):
        for j in range(16):
            first = second = np.float32(0)
            for k in range(16):
                first += of_a[32 * i + 2 * k] * np.float32(1) * of_b[32 * k + 2 * j]
                second += of_a[32 * i + 2 * k + 1] * np.float32(1) * of_b[32 * k + 2 * j + 1]
            totals[16 * i + j] += first + second


def faults() -> int:
    """So often were registers used that were not configured, or configured twice; registers that are still configured
    count too. Starts anew."""
    count = int(_STATE[_FAULTS] + _STATE[_CONFIGURED])
    _STATE[:] = 0
    return count


TILES = types.SimpleNamespace(
    configure=configure, release=release, clear=clear, load=load, store=store, multiply_add=multiply_add
)
