"""Compares every Triton kernel with PyTorch's operations on a device, in a process of its own.

    python -m efficient_densenet.kernels.check_on_device cuda:0 bfloat16 tf32

Prints one line: nothing, or the kernel that fails and what was found. A kernel that ends the process, or never ends,
does so here and not in a training run. `first_contact` starts it.
"""

import importlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from . import portable
from .comparison import OPERATIONS, SETTINGS, STEM_OPERATIONS, Case, Results, StemCase, is_valid
from .first_contact import COULD_NOT_CHECK

TOLERANCES = {"ieee": 2e-5, "tf32": 8e-3, torch.float16: 8e-3, torch.bfloat16: 2e-2}
"""How far a result may be from the exact one, over the largest value of its tensor. A wrong index, mask or sum makes it
about as large as the values."""

SIZES = [((2, 5, 13), 5, 48), ((1, 9, 7), 36, 16), ((3, 8, 8), 32, 128)]
"""Shape, input and output channels: tiles that are partly and wholly filled, rows that are aligned or not, in several
tiles of rows and channels."""

LARGE = (9, 128, 128), 16, 16
"""So many rows that each program instance has several tiles of them."""

Check = Callable[[], str | None]

_random_numbers = threading.Lock()
"""Held by the thread that draws from PyTorch's generator, so that each case has the same numbers everywhere."""


def find_fault(device: str, dtype: torch.dtype, precision: str, num_threads: int = 16) -> str | None:
    """The first kernel that fails, and what was found; or None. Kernels are compiled in several threads."""
    kernels = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.operations")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    tolerance = TOLERANCES[precision if dtype is torch.float32 else dtype]
    checks = list(_checks(kernels, device, dtype, tolerance))
    with ThreadPoolExecutor(num_threads) as pool:
        faults = pool.map(_run, checks) if num_threads > 1 else map(_run, checks)
        return next((fault for fault in faults if fault is not None), None)


@torch.no_grad()
def _run(check: Check) -> str | None:
    return check()


def _checks(kernels: Any, device: str, dtype: torch.dtype, tolerance: float) -> Iterator[Check]:
    sizes = [*SIZES, LARGE] if device.startswith("cuda") else SIZES
    for operation, function in OPERATIONS.items():
        for shape, channels, width in sizes:
            for setting, options in SETTINGS.items():
                if is_valid(operation, shape, channels, setting) and (setting == "usual" or channels == 36):
                    case = partial(Case, shape, channels, width, dtype, **options)
                    yield partial(_compare, operation, function, kernels, case, device, tolerance)
    for operation in [name for name in OPERATIONS if "conv3x3" in name]:
        for shape, dilation in [((2, 9), 1), ((2, 4, 3, 5), 1), ((2, 5, 13), 2)]:
            case = partial(Case, shape, 9, 16, dtype, dilation=dilation)
            yield partial(_compare, operation, OPERATIONS[operation], kernels, case, device, tolerance)
    for operation, function in STEM_OPERATIONS.items():
        for memory_format in torch.contiguous_format, torch.channels_last:
            for channels in 3, 64:
                case = partial(StemCase, channels, dtype, memory_format)
                yield partial(_compare, operation, function, kernels, case, device, tolerance)


def _compare(
    operation: str,
    function: Callable[[Any, Any], Results],
    kernels: Any,
    make_case: Callable[[], Any],
    device: str,
    tolerance: float,
) -> str | None:
    """What is wrong with an operation's results, or None."""
    with _random_numbers:
        torch.manual_seed(0)
        case = make_case().on(device)
    exact = function(portable, case.in_float64())
    try:
        results = function(kernels, case)
        difference = _largest_difference(results, exact)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{operation} raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if difference <= tolerance:
        return None
    return f"{operation} differs from PyTorch's operations by {difference:.1e} of the largest value"


def _largest_difference(results: Results, exact: Results) -> float:
    """Of elements, over the largest value of the tensor. Infinite for NaN."""
    worst = 0.0
    for result, reference in zip(results, exact, strict=True):
        difference = float((result - reference).abs().max() / reference.abs().max())
        worst = max(worst, difference if difference < math.inf else math.inf)
    return worst


def main(device: str, dtype: str, precision: str) -> None:
    try:
        torch.zeros(1, device=device)
        print(find_fault(device, getattr(torch, dtype), precision) or "", flush=True)
    except RuntimeError as error:  # the device is absent or taken, or has too little memory left
        print(" ".join(str(error).split())[:300], flush=True)
        sys.exit(COULD_NOT_CHECK)


if __name__ == "__main__":
    main(*sys.argv[1:])
