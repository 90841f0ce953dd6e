"""Kernels compiled ahead, by processes without a device, are found in Triton's cache by those who launch them."""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import kernel_modules

from efficient_densenet.kernels import check_on_device
from efficient_densenet.kernels.comparison import Case, StemCase

triton = pytest.importorskip("triton", reason="needs Triton")
tl = triton.language
launch, operations, compile_ahead, tiles, conv3x3 = kernel_modules(
    "triton_gpu", "launch", "operations", "compile_ahead", "tiles", "conv3x3"
)
from test_triton_launch import JITFunction, driver, scaled  # noqa: E402, F401 (the driver is a fixture)


def wrong(output, values, num_rows, BLOCK: tl.constexpr):
    tl.store(output + tl.arange(0, BLOCK), num_rows[0])


def compiled(directory: Path) -> dict[Path, int]:
    """The compiled kernels in Triton's cache, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*.cubin")}


def launches(kernel, num_rows: int, offset: int = 0):
    """A function that launches the kernel on the meta device, or on tensors that the driver of the tests takes."""

    def function(empty=lambda: torch.empty(99, device="meta")):
        constants = {"ADDEND": 2.0} if kernel.fn is scaled else {}
        numbers = (num_rows, 0.5) if kernel.fn is scaled else (num_rows,)
        launch.launch(launch.cached_launch(kernel, (5,), *numbers, BLOCK=32, **constants), empty(), empty()[offset:])

    return function


class Tensor(torch.Tensor):
    """Says that it is on a GPU."""

    def get_device(self) -> int:
        return 0


def test_what_is_compiled_ahead_is_not_compiled_again(driver, tmp_path):  # noqa: F811
    kernels = [JITFunction(scaled, do_not_specialize=["num_rows"]), JITFunction(wrong)]
    functions = [
        launches(kernels[0], 32),
        launches(kernels[0], 32, 1),
        launches(kernels[0], 48),
        launches(kernels[1], 2),
    ]
    compile_ahead.compile_ahead(functions, (8, 0), 2)
    ahead = compiled(tmp_path)
    assert len(ahead) == 2  # aligned, and not
    for function in functions[:3]:
        function(lambda: torch.empty(99).as_subclass(Tensor))
    assert len(driver.launches) == 3
    assert compiled(tmp_path) == ahead
    with pytest.raises(triton.CompilationError):
        functions[3](lambda: torch.empty(99).as_subclass(Tensor))


@pytest.fixture
def statuses(monkeypatch):
    """Those of the processes that have been waited for."""

    def wait(pid, options):
        child, status = waitpid(pid, options)
        found.append(status)
        return child, status

    found, waitpid = [], os.waitpid
    monkeypatch.setattr(os, "waitpid", wait)
    return found


def sleep(_) -> None:
    while True:
        time.sleep(60)


def test_the_processes_end_when_half_of_the_time_is_over(monkeypatch, statuses):
    monkeypatch.setattr(compile_ahead.driver, "set_active", sleep)
    alarms: list = []
    before = signal.signal(signal.SIGALRM, lambda *arguments: alarms.append(arguments))
    try:
        signal.setitimer(signal.ITIMER_REAL, 2)
        compile_ahead.compile_ahead([launches(JITFunction(scaled), 32)] * 2, (8, 0), 2)
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert statuses == [signal.SIGALRM]
    assert alarms == []
    assert left > 0.2


SLOW = """
import os, sys, time
os.sched_getaffinity = lambda pid: {0, 1}
from test_compile_ahead import JITFunction, compile_ahead, launches, scaled
kernels = [JITFunction(scaled) for _ in range(600)]
for i, kernel in enumerate(kernels):
    kernel.__name__ = f"scaled_{i}"
    kernel.warmup = lambda *_, **__: time.sleep(0.1)
start = compile_ahead._start
def started(*arguments):
    child = start(*arguments)
    print(child, flush=True)
    return child
compile_ahead._start = started
compile_ahead.compile_ahead([launches(kernel, 32) for kernel in kernels], (8, 0), 2)
"""


def test_the_processes_end_with_the_one_that_waits():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", SLOW], env=environment, stdout=subprocess.PIPE, text=True) as process:
        children = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
        assert process.stdout.read() == ""  # they do not hold it open
    deadline = time.monotonic() + 15  # all of it would take 30 seconds
    while any(Path(f"/proc/{child}/exe").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_fewer_processes_than_wanted_are_enough(monkeypatch, statuses, driver, tmp_path):  # noqa: F811
    def fork():
        if len(forked) == 1:
            raise BlockingIOError("no more processes")
        forked.append(None)
        return forks()

    forked, forks = [], os.fork
    monkeypatch.setattr(os, "fork", fork)
    kernel = JITFunction(scaled, do_not_specialize=["num_rows"])
    functions = [launches(kernel, 32), launches(JITFunction(wrong), 2), launches(kernel, 32, 1)]
    compile_ahead.compile_ahead(functions, (8, 0), 2)
    assert statuses == [0]
    assert len(compiled(tmp_path)) == 2


@pytest.mark.parametrize(("processors", "expected"), [(1, 0), (2, 2), (9, 2)])
def test_no_more_processes_than_processors_or_kernels(processors, expected, monkeypatch):
    def start(*_):
        child = os.fork()
        if child == 0:
            os._exit(0)
        started.append(child)
        return child

    started: list = []
    monkeypatch.setattr(compile_ahead, "_start", start)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    functions = [launches(JITFunction(each), 32) for each in (scaled, wrong)]
    compile_ahead.compile_ahead([*functions, launches(JITFunction(scaled), 32)], (8, 0), 16)
    assert len(started) == expected  # of two names


def test_the_target_is_the_device_s():
    assert compile_ahead._Target((8, 6)).get_current_target().arch == 86


@pytest.mark.parametrize("make_case", [partial(Case, (2, 3, 5), 6, 16), partial(StemCase, 5, torch.float32)])
def test_a_case_on_a_device_keeps_strides_and_offsets(make_case):
    case = make_case()
    moved = vars(case.on("meta"))
    tensors = {name: each for name, each in vars(case).items() if isinstance(each, torch.Tensor)}
    assert len(tensors) > 2
    for name, tensor in tensors.items():
        assert moved[name].is_meta
        assert (moved[name].stride(), moved[name].storage_offset()) == (tensor.stride(), tensor.storage_offset()), name


def _key(prepared, tensors) -> tuple[str, ...]:
    aligned = [each if each is None else each.data_ptr() % 16 == 0 for each in tensors]
    dtypes = [each if each is None else each.dtype for each in tensors]
    return prepared.kernel.fn.__name__, str(sorted(prepared.constants.items())), str(dtypes), str(aligned)


@pytest.mark.parametrize(("dtype", "activation"), [(torch.float32, "relu"), (torch.bfloat16, "elu")])
def test_all_kernels_of_a_comparison_are_compiled_ahead(dtype, activation, monkeypatch):
    """Of the same constants, for tensors of the same dtypes and alignment."""

    def start(groups, *_):
        ahead.update(_key(*each) for group in groups for each in group)
        raise OSError

    ahead: set = set()
    monkeypatch.setattr(compile_ahead, "_start", start)
    monkeypatch.setattr(compile_ahead, "JITFunction", object)  # they are interpreted here
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for module in tiles, conv3x3:
        monkeypatch.setattr(module, "device_limits", lambda device: tiles.OF_H100)
    check_on_device._compile_ahead(operations, "cuda:0", dtype, activation, 16)

    compared: set = set()
    monkeypatch.setattr(launch, "launch", lambda prepared, *tensors: compared.add(_key(prepared, tensors)))
    for check in itertools.chain(*check_on_device._checks_on("cuda:0", dtype, activation)):
        with torch.no_grad(), contextlib.suppress(AssertionError):  # of a case that finds memory that nobody wrote
            check.function(operations, check.make_case())
    assert len(compared) > 20
    assert sorted(compared - ahead) == []
