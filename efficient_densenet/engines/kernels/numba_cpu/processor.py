"""What the processor has that products are compiled for, less what the user leaves out."""

import functools
import os

import llvmlite.binding

VARIABLE = "EFFICIENT_DENSENET_DISABLE_CPU_FEATURES"

_LLVM_FEATURES = {
    "avx512": {"avx512f"},
    "avx512_bf16": {"avx512f", "avx512bf16"},
    "amx": {"amx-tile", "amx-bf16"},
}


def has(feature: str) -> bool:
    """Whether the processor has avx512, avx512_bf16 or amx. Without the first the second is left out too."""
    left_out = _left_out(os.environ.get(VARIABLE, ""))
    implied = {"avx512_bf16": "avx512"}.get(feature)
    return not left_out & {feature, implied} and _LLVM_FEATURES[feature] <= _found()


def features() -> tuple[str, ...]:
    """All that it has. Machine code depends on them."""
    return tuple(name for name in _LLVM_FEATURES if has(name))


@functools.cache
def _found() -> set[str]:
    return {name for name, is_there in llvmlite.binding.get_host_cpu_features().items() if is_there}


def _left_out(names: str) -> set[str]:
    left_out = {name.strip() for name in names.split(",")} - {""}
    if unknown := left_out - set(_LLVM_FEATURES):
        raise ValueError(
            f"{VARIABLE}: found {', '.join(sorted(unknown))}; needed are names among {', '.join(_LLVM_FEATURES)}, "
            "separated by commas"
        )
    return left_out
