"""Compares every Triton kernel with PyTorch's operations on a device, in a process of its own, for `first_contact`; and
times a layer by both where no such card was measured.

`main` prints `STARTED` and then `VERDICT` with a JSON object. A kernel that ends the process, or never ends, does so
here and not in a training run.
"""

import faulthandler
import functools
import importlib
import itertools
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from . import portable
from .comparison import OPERATIONS, SETTINGS, STEM_OPERATIONS, Case, Results, StemCase, is_valid

STARTED = "efficient_densenet compares kernels"
VERDICT = "efficient_densenet has compared kernels: "

TOLERANCES = {"ieee": 2e-5, "tf32": 8e-3, torch.float16: 8e-3, torch.bfloat16: 2e-2}
"""Largest difference from the exact result, over the largest value of its tensor. A wrong index, mask or sum makes it
about as large as the values."""

LARGEST_ROUNDING = 5e-2
"""Where PyTorch's operations differ by more than the tolerance, as in sums of bfloat16 over many rows, a difference of
twice theirs is rounding too, but none above this one."""

UNALIGNED = [((2, 5, 13), 5, 48), ((1, 9, 7), 36, 16), ((3, 8, 8), 32, 128)]
"""Shape, input and output channels of matrices with rows that are not aligned, in tiles that are filled or not."""

ALIGNED = [((2, 6, 6), *channels) for channels in ((96, 128), (192, 192), (108, 48), (150, 48))]
ALIGNED_CONV3X3 = [((2, 6, 6), *channels) for channels in ((128, 32), (192, 48), (48, 12))]
"""Shapes and channels of 3×3 convolutions in densenet121, densenet161 and BC-100-12."""

FEATURES = {"centered": True, "centered_bottleneck": False}
"""Arguments of a case as in a stage whose norms are not frozen: features are stored centered, bottlenecks are not."""

ROUNDS = 5
"""The number of times that a layer is timed."""

LARGE = [((9, 128, 128), 16, 48), ((2, 96, 96), 16, 128), ((2, 96, 96), 16, 192)]
"""Sizes at which program instances have several tiles of rows, or statistics are of many tiles."""

MEASURED = {(9, 0)}
"""Compute capabilities of cards on which the Triton kernels were measured, and are faster."""

LAYER_SHAPE, CONV1X1, CONV3X3 = (64, 56, 56), (320, 128), (128, 32)
"""Shape and channels of a layer of densenet121, whose products take a larger part of the time than those of BC-100-12:
on a card where Triton multiplies without tensor cores, kernels that are faster here are so there."""

_random_numbers = threading.Lock()
"""Lock of the thread that draws from PyTorch's generator, so that each case has the same numbers everywhere."""

_LACKS = "out of memory", "ALLOC_FAILED", "busy or unavailable"
"""Parts of error messages that mean resources are missing, not a wrong kernel."""


class Check(NamedTuple):
    operation: str
    function: Callable[[Any, Any], Results]
    make_case: Callable[[], Any]


class CannotCompareError(Exception):
    """Something is lacking, such as memory."""


def find_fault(
    device: str, dtype: torch.dtype, precision: str, activation: str = "relu", num_threads: int = 16
) -> str | None:
    """The first kernel that fails, and what was found; or None. With another activation than ReLU, of which all kernels
    have been compared before, only those that apply it run, on few cases.

    The smaller cases run in several threads, which compile their kernels; then the large ones run one by one.
    """
    kernels = importlib.import_module(f"{__package__}.triton_gpu.host.operations")
    compare = partial(_compare, kernels, device, TOLERANCES[precision if dtype is torch.float32 else dtype])
    small, large = _checks_on(device, dtype, activation)
    random.Random(0).shuffle(small)  # neighbors use the same kernels, which several threads would compile
    with ThreadPoolExecutor(num_threads) as pool:
        faults = itertools.chain((pool.map if num_threads > 1 else map)(compare, small), map(compare, large))
        fault = next(filter(None, faults), None)
        pool.shutdown(cancel_futures=True)
    return fault


@torch.no_grad()
def find_slowness(device: str, dtype: torch.dtype) -> str | None:
    """The times of a layer where the Triton kernels take longer than PyTorch's operations; or None."""
    conv1x1 = Case(LAYER_SHAPE, *CONV1X1, dtype, device=device, padding=0, centered=True, centered_bottleneck=False)
    conv3x3 = Case(LAYER_SHAPE, *CONV3X3, dtype, device=device, padding=0)
    calls = [("conv1x1_forward_with_statistics", conv1x1), ("conv3x3_forward_with_statistics", conv3x3)]
    calls += [("conv3x3_backward", conv3x3), ("conv1x1_backward", conv1x1)]
    sets = importlib.import_module(f"{__package__}.triton_gpu.host.operations"), portable
    rounds = [[_seconds(kernels, calls) for kernels in sets] for _ in range(ROUNDS)]  # the first compiles
    ours, theirs = map(min, zip(*rounds, strict=True))
    if ours <= theirs:
        return None
    return f"a layer takes {1000 * ours:.2f} ms, but {1000 * theirs:.2f} ms by PyTorch's operations"


def _seconds(kernels: Any, calls: list[tuple[str, Case]]) -> float:
    start = time.perf_counter()
    results = [OPERATIONS[operation](kernels, case) for operation, case in calls]
    results[-1][-1][0, 0].item()  # waits for the device
    return time.perf_counter() - start


def _checks_on(device: str, dtype: torch.dtype, activation: str) -> tuple[list[Check], list[Check]]:
    """The small checks, and the large ones."""
    if activation != "relu":
        return [*checks_of_activation(activation, dtype)], []
    return [*checks(dtype)], [*large_checks(dtype)] if device.startswith("cuda") else []


def checks(dtype: torch.dtype) -> Iterator[Check]:
    for operation, function in OPERATIONS.items():
        for shape, channels, width in UNALIGNED:
            for setting in "usual", "overwrite", "frozen", "no_grad_weight":
                if is_valid(operation, shape, channels, setting) and (setting == "usual" or channels == 36):
                    options = SETTINGS[setting] if setting == "frozen" else _options(operation)[0] | SETTINGS[setting]
                    yield Check(operation, function, partial(Case, shape, channels, width, dtype, **options))
        for shape, channels, width in ALIGNED_CONV3X3 if "conv3x3" in operation else ALIGNED:
            for options in _options(operation):
                yield Check(operation, function, partial(Case, shape, channels, width, dtype, padding=0, **options))
    for operation in [name for name in OPERATIONS if "conv3x3" in name]:
        for shape, dilation in [((2, 9), 1), ((2, 4, 3, 5), 1), ((2, 5, 13), 2)]:
            yield Check(operation, OPERATIONS[operation], partial(Case, shape, 9, 16, dtype, dilation=dilation))
    for operation, function in STEM_OPERATIONS.items():
        for size in (9, 14), (8, 12):
            yield Check(operation, function, partial(StemCase, 64, dtype, torch.contiguous_format, size))
        for channels in 3, 64:
            yield Check(operation, function, partial(StemCase, channels, dtype, torch.channels_last))


def checks_of_activation(activation: str, dtype: torch.dtype) -> Iterator[Check]:
    for operation, function in OPERATIONS.items():
        if operation.startswith(("conv", "pooled")):
            shape, channels, width = UNALIGNED[0]
            make_case = partial(Case, shape, dtype=dtype, activation=activation)
            yield Check(operation, function, partial(make_case, channels, width))
            for shape, *channels in (ALIGNED_CONV3X3 if "conv3x3" in operation else ALIGNED)[:1]:
                make_case = partial(Case, shape, *channels, dtype, padding=0, activation=activation)
                yield Check(operation, function, partial(make_case, **_options(operation)[0]))
    for operation, function in STEM_OPERATIONS.items():
        if "activation" in operation:
            for memory_format in torch.contiguous_format, torch.channels_last:
                make_case = partial(StemCase, 64, dtype, memory_format, activation=activation)
                yield Check(operation, function, make_case)


def large_checks(dtype: torch.dtype) -> Iterator[Check]:
    """Operations with equal arguments have one case: its random numbers take longer than they do."""
    for shape, channels, width in LARGE:
        make_case = functools.cache(partial(Case, shape, channels, dtype=dtype, padding=0))
        for operation, function in OPERATIONS.items():
            out_channels = 12 if "conv3x3" in operation else width  # wider ones are cuDNN's
            yield Check(operation, function, partial(make_case, width=out_channels, **_options(operation)[0]))


def _options(operation: str) -> list[dict[str, bool]]:
    """Arguments of an operation's cases in a stage."""
    options = {} if "conv3x3" in operation or operation == "batch_statistics" else FEATURES
    return [options, options | {"overwrite": True}] if operation.endswith("backward") else [options]


@torch.no_grad()
def _compare(kernels: Any, device: str, tolerance: float, check: Check) -> str | None:
    """The fault of an operation's results, or None."""
    try:
        with _random_numbers:
            torch.manual_seed(0)
            case = check.make_case().on(device)
        exact = check.function(portable, case.in_float64())
        difference = _largest_difference(check.function(kernels, case), exact)
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        if isinstance(error, OSError | MemoryError | torch.OutOfMemoryError) or any(each in message for each in _LACKS):
            raise CannotCompareError(message) from error
        return f"{check.operation} raises {type(error).__name__}: {message}"
    if difference > tolerance:
        rounding = _largest_difference(check.function(portable, case), exact)
        tolerance = min(2 * rounding, LARGEST_ROUNDING) if rounding > tolerance else tolerance
    if difference <= tolerance:
        return None
    return f"{check.operation} differs from PyTorch's operations by {difference:.1e} of the largest value"


def _largest_difference(results: Results, exact: Results) -> float:
    """The largest difference of elements, over the largest value of the tensor. Infinite for NaN."""
    worst = 0.0
    for result, reference in zip(results, exact, strict=True):
        difference = float((result - reference).abs().max() / reference.abs().max())
        worst = max(worst, difference if difference < math.inf else math.inf)
    return worst


def main(device: str, dtype: str, precision: str, activation: str, seconds: str) -> None:
    """Print the verdict: the device's name with the fault, the times of slower kernels, or what is lacking."""
    faulthandler.dump_traceback_later(int(seconds), exit=True)  # even in a kernel that never ends
    torch.set_num_threads(1)  # each of our threads would have as many of its own
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    verdict: dict[str, str | None] = {"device": None, "fault": None, "slower": None, "lacks": None}
    try:
        torch.zeros(1, device=device)
        verdict["device"] = torch.cuda.get_device_name(device)
        print(STARTED, flush=True)
        verdict["fault"] = find_fault(device, getattr(torch, dtype), precision, activation)
        is_new = activation == "relu" and torch.cuda.get_device_capability(device) not in MEASURED
        if is_new and verdict["fault"] is None:
            verdict["slower"] = find_slowness(device, getattr(torch, dtype))
    except (CannotCompareError, RuntimeError, AssertionError) as error:  # PyTorch finds no such device, or it is taken
        verdict["lacks"] = " ".join(str(error).split())[:300]
    print(VERDICT + json.dumps(verdict), flush=True)
