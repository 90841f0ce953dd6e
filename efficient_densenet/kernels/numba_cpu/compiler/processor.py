"""The processor's features for which products are compiled, without those that the user disables.

Numba compiles for the features that it finds, restricted by NUMBA_CPU_NAME, NUMBA_CPU_FEATURES and NUMBA_ENABLE_AVX.
LLVM aborts the process if an instruction is requested that its target lacks, so these restrictions count here too.
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
    """Whether the processor has the feature avx512, avx512_bf16 or amx, and the user has not disabled it.

    Disabling avx512 disables all three: the other features' kernels use AVX-512's vectors.
    """
    return not _left_out() & {feature, "avx512"} and is_found(feature)


def is_found(feature: str) -> bool:
    """Whether the processor has the feature, even if the user has disabled it."""
    return _LLVM_FEATURES[feature] <= _found()


def features() -> tuple[str, ...]:
    """The enabled features of the processor, on which machine code depends."""
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
