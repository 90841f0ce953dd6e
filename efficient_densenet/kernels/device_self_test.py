"""The device self-test: whether the Triton kernels may run on a GPU, and are the fastest there.

The first use of a device, for each dtype, starts a process of its own (`main`), which a kernel may end or keep busy. It
compares each kernel with PyTorch's operations, and times a layer by the kernels, by PyTorch's operations and by plain
modules. The result is kept on disk. After an exception, a crash or a timeout, which may say nothing about the kernels,
they do not run in this process, and the next one tests again.
"""

import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import logging
import math
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from . import convolution, disk_cache, portable
from .comparison import OPERATIONS, SETTINGS, STEM_OPERATIONS, Case, Results, StemCase, is_valid

logger = logging.getLogger("efficient_densenet")  # whose warnings Python shows by default

VARIABLE = "EFFICIENT_DENSENET_TRITON"
MODES = {
    "check": "compare the kernels with PyTorch's operations at the first use (the default)",
    "trust": "run the kernels unchecked",
    "off": "run PyTorch's operations instead",
}

SECONDS, COSTLY = 120, 1.1
"""The most time of a test; and the time of a layer, over that of plain modules, from which a warning says so."""

TRITON, RESULT = f"{__package__}.triton_gpu.host.operations", "efficient_densenet has tested kernels: "

TOLERANCES = {"ieee": 2e-5, "tf32": 8e-3, torch.float16: 8e-3, torch.bfloat16: 2e-2}
"""Largest difference from the exact result, over the largest value of its tensor. A wrong index, mask or sum makes it
about as large as the values."""

MAX_RELATIVE_ERROR = 5e-2
"""Where PyTorch's operations differ by more than the tolerance, as in sums of bfloat16 over many rows, a difference of
twice theirs is rounding too, but none above this one."""

UNALIGNED = [((2, 5, 13), 5, 48), ((3, 8, 8), 32, 128), ((1, 9, 7), 36, 16)]
"""Shape, input and output channels of matrices with rows that are not aligned, in tiles that are filled or not."""

ALIGNED = [((2, 6, 6), *channels) for channels in ((96, 128), (192, 192), (108, 48), (150, 48))]
"""Shapes and channels of 1×1 convolutions in densenet121, densenet161 and BC-100-12. The 3×3 convolutions after them
have a quarter of the output channels."""

LAYER = (64, 56, 56), 320, 128, 32
LARGE = [((9, 128, 128), 16, 48), ((2, 96, 96), 16, 128), ((2, 96, 96), 16, 192)]
"""Sizes at which program instances have several tiles of rows, or statistics are of many tiles."""


class Result(NamedTuple):
    """The failure of the kernels, "" if there is none; or, if it is not `certain`, why they were not tested.

    `seconds` are a layer's, by the kernels (infinite if they failed), by PyTorch's operations and by plain modules.
    """

    failure: str = ""
    certain: bool = True
    seconds: Sequence[float] = ()

    @property
    def passed(self) -> bool:
        return not self.failure and (not self.seconds or self.seconds[0] <= self.seconds[1])

    def times(self) -> str:
        times = zip(self.seconds, ("Triton's kernels", "PyTorch's operations", "plain modules"), strict=False)
        said = [f"{1000 * each:.2f} ms by {name}" for each, name in times if each < math.inf]
        return f"a layer takes {', '.join(said)}" if said else ""


def may_run(device: torch.device, dtype: torch.dtype, activation: str = "relu") -> bool:
    """Whether the Triton kernels may run on a CUDA device for features of `dtype`, and apply `activation`; tests them
    there if that is not known."""
    chosen = mode()
    if chosen != "check":
        return chosen == "trust"
    index = torch.cuda.current_device() if device.index is None else device.index
    # On the precision of products depend only the kernels for float32.
    precision = convolution.precision() if dtype is torch.float32 else "ieee"
    return result(index, dtype, precision, activation=activation).passed


def mode() -> str:
    """The user's choice by the environment variable."""
    chosen = os.environ.get(VARIABLE, "check")
    if chosen not in MODES:
        raise ValueError(f"{VARIABLE} is {chosen!r}, but must be one of {', '.join(MODES)}")
    return chosen


@functools.cache
def result(index: int, dtype: torch.dtype, precision: str, *, activation: str) -> Result:
    """The result on disk, or that of a new test; with a warning of a failure, and of a layer that takes longer than by
    plain modules."""
    tested, device = (index, dtype, precision, activation), torch.cuda.get_device_name(index)
    kind = f"{_name(dtype)}{'' if activation == 'relu' else f' and {activation}'} on {device}"
    found = stored_result(*tested)
    if found is None:
        logger.warning("testing the Triton kernels for %s once, about 15 s", kind)
        found = _test(*tested)
        if found.certain:
            disk_cache.store(*_file(*tested), json.dumps(found).encode())
    instead = f"PyTorch's operations run in the place of the Triton kernels for {kind}"
    if found.failure:
        cause = "of what a test has found" if found.certain else "they could not be tested"
        remedy = f"{VARIABLE}=off tests nothing, =trust runs them unchecked. Please report what is no lack of memory"
        warnings.warn(f"{instead}, since {cause}: {found.failure}. {remedy}", stacklevel=2)
    elif not found.passed:
        logger.warning("%s: %s", instead, found.times())
    if found.seconds and (ratio := min(found.seconds[:2]) / found.seconds[2]) > COSTLY:
        costs = f"efficient=True saves memory, but takes about {ratio:.1f} times the time of efficient=False"
        warnings.warn(f"{costs} for {kind}: {found.times()}", stacklevel=2)
    return found


def stored_result(index: int, dtype: torch.dtype, precision: str, activation: str) -> Result | None:
    """The result of an earlier test, or None."""
    content = disk_cache.load(*_file(index, dtype, precision, activation))
    return None if content is None else Result(*json.loads(content))


def _file(index: int, dtype: torch.dtype, precision: str, activation: str) -> tuple[str, bytes]:
    """The name of a result on disk, and a key of everything on which it depends."""
    folder = Path(__file__).parent
    sources = b"\0".join(
        file.read_bytes() for file in sorted([*folder.glob("*.py"), *folder.glob("triton_gpu/**/*.py")])
    )
    versions = torch.__version__, torch.version.cuda, importlib.import_module("triton").__version__
    device = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    key = *device, *versions, hashlib.sha256(sources).hexdigest()
    tested = _name(dtype), precision, activation
    return "_".join(["triton", *tested]), json.dumps([*key, *tested]).encode()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _test(index: int, dtype: torch.dtype, precision: str, activation: str) -> Result:
    """The result that a process of its own prints."""
    arguments = f"cuda:{index}", torch.cuda.get_device_name(index), _name(dtype), precision, activation
    environment = os.environ | {VARIABLE: "off"}  # whatever it starts tests nothing
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    # With this process's own paths, which the working directory need not be among.
    start = f"import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from {__name__} import main; main(*sys.argv[1:])"
    try:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("there is no Python interpreter to start, as in a frozen application")
        command = sys.executable, "-c", start, "\n".join(sys.path), *arguments
        done = subprocess.run(command, env=environment, timeout=SECONDS, check=False, **streams)
        printed = [line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)]
        if printed:
            return Result(*json.loads(printed[-1]))
    except Exception as error:  # whatever it is, training goes on
        return Result(f"the test could not be run ({error})", certain=False)
    ended = f"the test ended with status {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
    return Result(ended, certain=False)


# In the process of its own


def main(device: str, device_name: str, dtype: str, precision: str, activation: str) -> None:
    """Test the kernels and print the result."""
    torch.set_num_threads(1)  # each of our threads would have as many of its own
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        torch.zeros(1, device=device)
        if (found := torch.cuda.get_device_name(device)) != device_name:
            found = f"the process that tests finds {found} in the place of {device_name}"
            raise RuntimeError(f"{found}: set CUDA_VISIBLE_DEVICES before Python starts")
        failure = find_failure(device, getattr(torch, dtype), precision, activation)
        times: Sequence[float] = ()
        with contextlib.suppress(RuntimeError):  # no memory is left, or a failure has ended the process's use of CUDA
            times = time_layer(device, getattr(torch, dtype), not failure) if activation == "relu" else ()
        tested = Result(failure or "", seconds=times)
    except Exception as error:  # PyTorch finds no such device, memory is lacking, or a kernel cannot be compiled
        tested = Result(" ".join(str(error).split())[:300], certain=False)
    print(RESULT + json.dumps(tested), flush=True)


def find_failure(device: str, dtype: torch.dtype, precision: str, activation: str, num_threads: int = 16) -> str | None:
    """The first kernel that fails, and how; or None.

    The smaller cases run in several threads, which compile their kernels; then the large ones run one by one.
    """
    compare = partial(
        _compare, importlib.import_module(TRITON), TOLERANCES[precision if dtype is torch.float32 else dtype]
    )
    torch.manual_seed(0)
    small = [*checks(device, dtype, activation)]
    large = large_checks(device, dtype) if device.startswith("cuda") and activation == "relu" else ()
    random.Random(0).shuffle(small)  # neighbors use the same kernels, which several threads would compile
    with ThreadPoolExecutor(num_threads) as pool:
        failures = itertools.chain((pool.map if num_threads > 1 else map)(compare, small), map(compare, large))
        return next(filter(None, failures), None)


def time_layer(device: str, dtype: torch.dtype, with_triton: bool) -> list[float]:
    """`Result.seconds` of a layer of densenet121. By kernels the backward recomputes the bottleneck, as in a stage."""
    shape, channels, width, growth_rate = LAYER
    conv1x1 = Case(shape, channels, width, dtype, device=device, padding=0, **_features("conv1x1"))
    conv3x3 = Case(shape, width, growth_rate, dtype, device=device, padding=0)
    calls = [("conv1x1_forward_with_statistics", conv1x1), ("conv3x3_forward_with_statistics", conv3x3)]
    calls += [("conv1x1_forward", conv1x1), ("conv3x3_backward", conv3x3), ("conv1x1_backward", conv1x1)]
    norms = nn.BatchNorm2d(channels), nn.BatchNorm2d(width)
    convs = nn.Conv2d(channels, width, 1, bias=False), nn.Conv2d(width, growth_rate, 3, padding=1, bias=False)
    layer = nn.Sequential(norms[0], nn.ReLU(True), convs[0], norms[1], nn.ReLU(True), convs[1]).to(device, dtype)
    sizes = [(shape[0], each, *shape[1:]) for each in (channels - growth_rate, growth_rate)]
    *features, grad_output = (torch.randn(each, device=device, dtype=dtype) for each in (*sizes, sizes[1]))

    def seconds(kernels: Any) -> float:
        """The time by a set of kernels, or by plain modules."""
        start = time.perf_counter()
        if kernels is None:
            inputs = [each.requires_grad_() for each in (*features, *layer.parameters())]
            output = torch.autograd.grad(layer(torch.cat(features, 1)), inputs, grad_output)[0]
        else:
            with torch.no_grad():
                output = [OPERATIONS[operation](kernels, case) for operation, case in calls][-1][-1]
        output[(0,) * output.dim()].item()  # waits for the device
        return time.perf_counter() - start

    runs = [*([importlib.import_module(TRITON)] if with_triton else []), portable, None]
    fastest = [min(each) for each in zip(*([seconds(run) for run in runs] for _ in range(5)), strict=True)]
    return fastest if with_triton else [math.inf, *fastest]


def checks(device: str, dtype: torch.dtype, activation: str = "relu") -> Iterator[tuple[str, Any]]:
    """Operations, each with a small case. With another activation than ReLU, few of those that apply it."""
    few = activation != "relu"
    make_case: Callable[..., Case] = partial(Case, dtype=dtype, activation=activation, device=device)
    for operation in [each for each in OPERATIONS if not few or each.startswith(("conv", "pooled"))]:
        is_conv3x3 = "conv3x3" in operation
        aligned = [(shape, n, n // 4) if is_conv3x3 else (shape, channels, n) for shape, channels, n in ALIGNED]
        for size in [*UNALIGNED, *aligned][:: 3 if few else 1]:
            for setting in ["usual"] if few else SETTINGS if size is UNALIGNED[-1] else ["usual", "overwrite"]:
                if is_valid(operation, *size[:2], setting):
                    features = {} if setting == "frozen" else _features(operation)
                    yield operation, make_case(*size, padding=3 * (size in UNALIGNED), **features | SETTINGS[setting])
        if is_conv3x3 and not few:
            yield operation, make_case((2, 5, 13), 9, 16, dilation=2)
    for operation in [each for each in STEM_OPERATIONS if not few or "activation" in each]:
        for channels, size in [(64, (9, 14)), (3, (9, 14)), (64, (8, 12))][:: 3 if few else 1]:
            for layout in torch.contiguous_format, torch.channels_last:
                yield operation, StemCase(channels, dtype, layout, size, activation, device=device)


def large_checks(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    for (shape, channels, width), operation in itertools.product(LARGE, OPERATIONS):
        out_channels = 12 if "conv3x3" in operation else width  # wider ones are cuDNN's
        yield operation, Case(shape, channels, out_channels, dtype, device=device, padding=0, **_features(operation))


def _features(operation: str) -> dict[str, Any]:
    """As in a stage whose norms are not frozen: features are stored centered, bottlenecks are not."""
    has_features = "conv3x3" not in operation and operation != "batch_statistics"
    return {"centered": True, "centered_bottleneck": False} if has_features else {}


@torch.no_grad()
def _compare(kernels: Any, tolerance: float, check: tuple[str, Any]) -> str | None:
    """What is wrong with an operation's results, or None."""
    operation, case = check
    function: Callable[[Any, Any], Results] = (OPERATIONS | STEM_OPERATIONS)[operation]
    try:
        exact = function(portable, case.in_float64())
        difference = _largest_difference(function(kernels, case), exact)
    except Exception as error:
        raise RuntimeError(f"{operation} raises {type(error).__name__}: {error}") from error
    if difference > tolerance:
        rounding = _largest_difference(function(portable, case), exact)
        tolerance = min(2 * rounding, MAX_RELATIVE_ERROR) if rounding > tolerance else tolerance
    if difference <= tolerance:
        return None
    return f"{operation} differs from PyTorch's operations by {difference:.1e} of the largest value"


def _largest_difference(results: Results, exact: Results) -> float:
    """The largest difference of elements, over the largest value of the tensor. Infinite for NaN."""
    pairs = zip(results, exact, strict=True)
    differences = [float((result - reference).abs().max() / reference.abs().max()) for result, reference in pairs]
    return max(each if each < math.inf else math.inf for each in differences)
