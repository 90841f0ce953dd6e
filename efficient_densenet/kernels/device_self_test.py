"""The device self-test: whether the Triton kernels may run on a GPU, and are the fastest there.

The first use of a device, for each dtype, starts a process of its own (`main`), in which a kernel may abort, never end
or break the CUDA context. It compares each kernel with PyTorch's operations, and times a layer by the kernels, by
PyTorch's operations and by plain modules. The result is kept on disk, for the device, the versions, the sources and the
dtype. One that says nothing about the kernels is not kept: the next process tests again. Activations other than ReLU
are tested when they are first used.
"""

import contextlib
import faulthandler
import functools
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import convolution, disk_cache, portable, python_process
from .comparison import OPERATIONS, SETTINGS, STEM_OPERATIONS, Case, Results, StemCase, is_valid

VARIABLE = "EFFICIENT_DENSENET_TRITON"
MODES = {
    "check": "compare the kernels with PyTorch's operations at the first use (the default)",
    "trust": "run the kernels unchecked",
    "off": "run PyTorch's operations instead",
}

SECONDS = 120
"""The most time of a test."""

STARTED = "efficient_densenet compares kernels"
RESULT = "efficient_densenet has tested kernels: "
"""The beginnings of lines that the process prints; a result is JSON."""

TOLERANCES = {"ieee": 2e-5, "tf32": 8e-3, torch.float16: 8e-3, torch.bfloat16: 2e-2}
"""Largest difference from the exact result, over the largest value of its tensor. A wrong index, mask or sum makes it
about as large as the values."""

MAX_RELATIVE_ERROR = 5e-2
"""Where PyTorch's operations differ by more than the tolerance, as in sums of bfloat16 over many rows, a difference of
twice theirs is rounding too, but none above this one."""

COSTLY = 1.1
"""The time of a layer, over that of plain modules, from which a warning says so."""

UNALIGNED = [((2, 5, 13), 5, 48), ((1, 9, 7), 36, 16), ((3, 8, 8), 32, 128)]
"""Shape, input and output channels of matrices with rows that are not aligned, in tiles that are filled or not."""

ALIGNED = [((2, 6, 6), *channels) for channels in ((96, 128), (192, 192), (108, 48), (150, 48))]
ALIGNED_CONV3X3 = [((2, 6, 6), *channels) for channels in ((128, 32), (192, 48), (48, 12))]
"""Shapes and channels of convolutions in densenet121, densenet161 and BC-100-12."""

LARGE = [((9, 128, 128), 16, 48), ((2, 96, 96), 16, 128), ((2, 96, 96), 16, 192)]
"""Sizes at which program instances have several tiles of rows, or statistics are of many tiles."""

FEATURES = {"centered": True, "centered_bottleneck": False}
"""Arguments of a case as in a stage whose norms are not frozen: features are stored centered, bottlenecks are not."""

LAYER_SHAPE, LAYER_CHANNELS, ROUNDS = (64, 56, 56), (320, 128, 32), 5
"""Shape and channels of the layer that is timed, of densenet121, and how many times. Its products take a larger part of
the time than those of BC-100-12, which counts where Triton multiplies without tensor cores."""

_CRASHES = [-each for each in signal.Signals if each.name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV")]

_LACKS = "out of memory", "ALLOC_FAILED", "busy or unavailable"
"""Parts of error messages that mean resources are missing, not a wrong kernel."""

_random_numbers = threading.Lock()
"""Lock of the thread that draws from PyTorch's generator, so that each case has the same numbers everywhere."""


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
        names = "Triton's kernels", "PyTorch's operations", "plain modules"
        times = zip(self.seconds, names, strict=False)
        said = [f"{1000 * each:.2f} ms by {name}" for each, name in times if each < math.inf]
        return f"a layer takes {', '.join(said)}" if said else ""


Check = tuple[str, Callable[[Any, Any], Results], Callable[[], Any]]
"""The name of an operation, the operation, and a function that makes its case."""


class CannotTestError(Exception):
    """Something is lacking, such as memory."""


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
        python_process.logger.warning("testing the Triton kernels for %s once, about 15 s", kind)
        try:
            found = _result_of(_run(*tested))
        except Exception as error:  # whatever it is, training goes on
            found = Result(f"the test could not be run ({error})", certain=False)
        if found.certain:
            disk_cache.store(_file_name(*tested[1:]), _key(*tested), json.dumps(found).encode())
    instead = f"PyTorch's operations run in the place of the Triton kernels for {kind}"
    if found.failure:
        cause = "of what a test has found" if found.certain else "they could not be tested"
        report = ". Please report it with what `python -m efficient_densenet.doctor` prints" if found.certain else ""
        trust = f"{VARIABLE}=trust runs the kernels unchecked{report}"
        warnings.warn(f"{instead}, since {cause}: {found.failure}. {trust}", stacklevel=2)
    elif not found.passed:
        python_process.logger.warning("%s: %s", instead, found.times())
    if found.seconds and (ratio := min(found.seconds[:2]) / found.seconds[2]) > COSTLY:
        costs = f"efficient=True saves memory, but takes about {ratio:.1f} times the time of efficient=False"
        warnings.warn(f"{costs} for {kind}: {found.times()}", stacklevel=2)
    return found


def stored_result(index: int, dtype: torch.dtype, precision: str, activation: str) -> Result | None:
    """The result of an earlier test, or None."""
    content = disk_cache.load(_file_name(dtype, precision, activation), _key(index, dtype, precision, activation))
    return None if content is None else Result(*json.loads(content))


def _file_name(dtype: torch.dtype, precision: str, activation: str) -> str:
    return f"triton_{_name(dtype)}_{precision}" + ("" if activation == "relu" else f"_{activation}")


def _run(index: int, dtype: torch.dtype, precision: str, activation: str) -> subprocess.CompletedProcess:
    arguments = f"cuda:{index}", torch.cuda.get_device_name(index), _name(dtype), precision, activation, str(SECONDS)
    environment = os.environ | {VARIABLE: "off"}  # whatever it starts tests nothing
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    command = python_process.command(__name__, *arguments)
    return subprocess.run(command, env=environment, timeout=SECONDS + 10, check=False, **streams)


def _result_of(done: subprocess.CompletedProcess) -> Result:
    """The result that the process has printed. Where it says nothing about the kernels, nothing is certain."""
    printed = [line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if printed:
        return Result(*json.loads(printed[-1]))
    failure = f"the test ended with status {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
    return Result(failure, STARTED in done.stdout and done.returncode in _CRASHES)


def _key(index: int, dtype: torch.dtype, precision: str, activation: str) -> bytes:
    """A key of everything on which the result depends."""
    device = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), _driver_version()
    versions = torch.__version__, str(torch.version.cuda), _triton_version(), _sources()
    return json.dumps([*device, *versions, _name(dtype), precision, activation]).encode()


def _driver_version() -> str:
    """The version that the driver's kernel module names; nothing where the module is the host system's, as in WSL2."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text() if file.exists() else ""


def _triton_version() -> str:
    import triton  # here, since machines without GPUs may lack it

    return triton.__version__


@functools.cache
def _sources() -> str:
    """A checksum of the kernels and of their test."""
    folder = Path(__file__).parent
    files = [*folder.glob("*.py"), *(folder / "triton_gpu").rglob("*.py")]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# In the process of its own


def main(device: str, device_name: str, dtype: str, precision: str, activation: str, seconds: str) -> None:
    """Test the kernels and print the result."""
    faulthandler.dump_traceback_later(int(seconds), exit=True)  # even in a kernel that never ends
    torch.set_num_threads(1)  # each of our threads would have as many of its own
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        torch.zeros(1, device=device)
        if (found := torch.cuda.get_device_name(device)) != device_name:
            found = f"the process that tests finds {found} in the place of {device_name}"
            raise CannotTestError(f"{found}: set CUDA_VISIBLE_DEVICES before Python starts")
        print(STARTED, flush=True)
        failure = find_failure(device, getattr(torch, dtype), precision, activation)
        times: Sequence[float] = ()
        with contextlib.suppress(RuntimeError):  # no memory is left, or a failure has ended the process's use of CUDA
            times = time_layer(device, getattr(torch, dtype), not failure) if activation == "relu" else ()
        tested = Result(failure or "", seconds=times)
    except (CannotTestError, RuntimeError, AssertionError) as error:  # PyTorch finds no such device, or it is taken
        tested = Result(" ".join(str(error).split())[:300], certain=False)
    print(RESULT + json.dumps(tested), flush=True)


def find_failure(
    device: str, dtype: torch.dtype, precision: str, activation: str = "relu", num_threads: int = 16
) -> str | None:
    """The first kernel that fails, and how; or None. With another activation than ReLU, of which all kernels have been
    compared before, only those that apply it run, on few cases.

    The smaller cases run in several threads, which compile their kernels; then the large ones run one by one.
    """
    kernels = importlib.import_module(f"{__package__}.triton_gpu.host.operations")
    compare = partial(_compare, kernels, device, TOLERANCES[precision if dtype is torch.float32 else dtype])
    small, large = _checks_on(device, dtype, activation)
    random.Random(0).shuffle(small)  # neighbors use the same kernels, which several threads would compile
    with ThreadPoolExecutor(num_threads) as pool:
        failures = itertools.chain((pool.map if num_threads > 1 else map)(compare, small), map(compare, large))
        failure = next(filter(None, failures), None)
        pool.shutdown(cancel_futures=True)
    return failure


def time_layer(device: str, dtype: torch.dtype, with_triton: bool = True) -> list[float]:
    """`Result.seconds`. By kernels the backward recomputes the bottleneck, as in a stage."""
    channels, width, growth_rate = LAYER_CHANNELS
    settings = {"device": device, "padding": 0}
    conv1x1 = Case(LAYER_SHAPE, channels, width, dtype, centered=True, centered_bottleneck=False, **settings)
    conv3x3 = Case(LAYER_SHAPE, width, growth_rate, dtype, **settings)
    calls = [("conv1x1_forward_with_statistics", conv1x1), ("conv3x3_forward_with_statistics", conv3x3)]
    calls += [("conv1x1_forward", conv1x1), ("conv3x3_backward", conv3x3), ("conv1x1_backward", conv1x1)]

    @torch.no_grad()
    def by_kernels(kernels: Any) -> Tensor:
        return [OPERATIONS[operation](kernels, case) for operation, case in calls][-1][-1]

    norm1, norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(width)
    convs = nn.Conv2d(channels, width, 1, bias=False), nn.Conv2d(width, growth_rate, 3, padding=1, bias=False)
    layer = nn.Sequential(norm1, nn.ReLU(True), convs[0], norm2, nn.ReLU(True), convs[1]).to(device, dtype)
    sizes = [(LAYER_SHAPE[0], each, *LAYER_SHAPE[1:]) for each in (channels - growth_rate, growth_rate)]
    features = [torch.randn(each, device=device, dtype=dtype, requires_grad=True) for each in sizes]
    grad_output = torch.randn_like(features[1])

    def by_plain_modules() -> Tensor:
        return torch.autograd.grad(layer(torch.cat(features, 1)), [*features, *layer.parameters()], grad_output)[0]

    def seconds(run: Callable[[], Tensor]) -> float:
        start = time.perf_counter()
        output = run()
        output[(0,) * output.dim()].item()  # waits for the device
        return time.perf_counter() - start

    runs: list[Callable[[], Tensor]] = [partial(by_kernels, portable), by_plain_modules]
    if with_triton:
        kernels = importlib.import_module(f"{__package__}.triton_gpu.host.operations")
        runs.insert(0, partial(by_kernels, kernels))
    rounds = [[seconds(run) for run in runs] for _ in range(ROUNDS)]  # the first compiles
    fastest = [min(each) for each in zip(*rounds, strict=True)]
    return fastest if with_triton else [math.inf, *fastest]


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
                    yield operation, function, partial(Case, shape, channels, width, dtype, **options)
        for shape, channels, width in ALIGNED_CONV3X3 if "conv3x3" in operation else ALIGNED:
            for options in _options(operation):
                yield operation, function, partial(Case, shape, channels, width, dtype, padding=0, **options)
        for shape, dilation in [((2, 9), 1), ((2, 4, 3, 5), 1), ((2, 5, 13), 2)] if "conv3x3" in operation else ():
            yield operation, function, partial(Case, shape, 9, 16, dtype, dilation=dilation)
    for operation, function in STEM_OPERATIONS.items():
        for size in (9, 14), (8, 12):
            yield operation, function, partial(StemCase, 64, dtype, torch.contiguous_format, size)
        for channels in 3, 64:
            yield operation, function, partial(StemCase, channels, dtype, torch.channels_last)


def checks_of_activation(activation: str, dtype: torch.dtype) -> Iterator[Check]:
    for operation, function in OPERATIONS.items():
        if operation.startswith(("conv", "pooled")):
            make_case = partial(Case, dtype=dtype, activation=activation)
            yield operation, function, partial(make_case, *UNALIGNED[0])
            aligned = (ALIGNED_CONV3X3 if "conv3x3" in operation else ALIGNED)[0]
            yield operation, function, partial(make_case, *aligned, padding=0, **_options(operation)[0])
    for operation, function in STEM_OPERATIONS.items():
        for memory_format in (torch.contiguous_format, torch.channels_last) if "activation" in operation else ():
            yield operation, function, partial(StemCase, 64, dtype, memory_format, activation=activation)


def large_checks(dtype: torch.dtype) -> Iterator[Check]:
    """Operations with equal arguments have one case: its random numbers take longer than they do."""
    for shape, channels, width in LARGE:
        make_case = functools.cache(partial(Case, shape, channels, dtype=dtype, padding=0))
        for operation, function in OPERATIONS.items():
            out_channels = 12 if "conv3x3" in operation else width  # wider ones are cuDNN's
            yield operation, function, partial(make_case, width=out_channels, **_options(operation)[0])


def _options(operation: str) -> list[dict[str, bool]]:
    """Arguments of an operation's cases in a stage."""
    options = {} if "conv3x3" in operation or operation == "batch_statistics" else FEATURES
    return [options, options | {"overwrite": True}] if operation.endswith("backward") else [options]


@torch.no_grad()
def _compare(kernels: Any, device: str, tolerance: float, check: Check) -> str | None:
    """What is wrong with an operation's results, or None."""
    operation, function, make_case = check
    try:
        with _random_numbers:
            torch.manual_seed(0)
            case = make_case().on(device)
        exact = function(portable, case.in_float64())
        difference = _largest_difference(function(kernels, case), exact)
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        if isinstance(error, OSError | MemoryError | torch.OutOfMemoryError) or any(each in message for each in _LACKS):
            raise CannotTestError(message) from error
        return f"{operation} raises {type(error).__name__}: {message}"
    if difference > tolerance:
        rounding = _largest_difference(function(portable, case), exact)
        tolerance = min(2 * rounding, MAX_RELATIVE_ERROR) if rounding > tolerance else tolerance
    if difference <= tolerance:
        return None
    return f"{operation} differs from PyTorch's operations by {difference:.1e} of the largest value"


def _largest_difference(results: Results, exact: Results) -> float:
    """The largest difference of elements, over the largest value of the tensor. Infinite for NaN."""
    worst = 0.0
    for result, reference in zip(results, exact, strict=True):
        difference = float((result - reference).abs().max() / reference.abs().max())
        worst = max(worst, difference if difference < math.inf else math.inf)
    return worst
