"""What the processor has that products are compiled for, less what the user leaves out.

Numba compiles for the features that it finds, or for those that NUMBA_CPU_NAME, NUMBA_CPU_FEATURES and NUMBA_ENABLE_AVX
leave of them: LLVM ends the process where an instruction is asked for that its target lacks.
"""

import functools
import os
from typing import Any

from numba.core.registry import cpu_target

VARIABLE = "EFFICIENT_DENSENET_DISABLE_CPU_FEATURES"

_LLVM_FEATURES = {
    "avx512": {"avx512f"},
    "avx512_bf16": {"avx512f", "avx512bf16"},
    "amx": {"avx512f", "amx-tile", "amx-bf16"},
}


def has(feature: str) -> bool:
    """Whether the processor has avx512, avx512_bf16 or amx.

    Without the first the others are left out too: their kernels use its vectors.
    """
    return not _left_out() & {feature, "avx512"} and is_found(feature)


def is_found(feature: str) -> bool:
    """Whether the processor has it, left out or not."""
    return _LLVM_FEATURES[feature] <= _found()


def features() -> tuple[str, ...]:
    """All that it has. Machine code depends on them."""
    return tuple(name for name in _LLVM_FEATURES if has(name))


@functools.cache
def _found() -> set[str]:
    context: Any = cpu_target.target_context
    _triple, _name, features = context.codegen().magic_tuple()
    return {feature[1:] for feature in features.split(",") if feature.startswith("+")}


@functools.cache
def _left_out() -> set[str]:
    """Read once: all kernels of a process are compiled for the same features."""
    left_out = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    if unknown := left_out - set(_LLVM_FEATURES):
        raise ValueError(
            f"{VARIABLE}: found {', '.join(sorted(unknown))}; needed are names among {', '.join(_LLVM_FEATURES)}, "
            "separated by commas"
        )
    return left_out
