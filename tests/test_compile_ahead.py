"""Kernels compiled ahead, by processes without a device, are found in Triton's cache by those who launch them."""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import kernel_modules

from efficient_densenet.kernels import check_on_device

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


def test_the_processes_end_with_the_alarm_of_the_one_that_waits(monkeypatch):
    def never_ends(target):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        while True:
            signal.pause()

    statuses, waitpid = [], os.waitpid
    monkeypatch.setattr(compile_ahead.driver, "set_active", never_ends)
    monkeypatch.setattr(os, "waitpid", lambda *arguments: statuses.append(waitpid(*arguments)[1]))
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1)
        compile_ahead.compile_ahead([launches(JITFunction(scaled), 32)], (8, 0), 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert statuses == [signal.SIGALRM]


@pytest.mark.parametrize(("dtype", "activation"), [(torch.float32, "relu"), (torch.bfloat16, "prelu")])
def test_the_kernels_of_a_comparison_are_those_that_are_compiled_ahead(dtype, activation, monkeypatch):
    """Of the same constants, with tensors of the same dtypes and alignment."""
    for module in tiles, conv3x3:
        monkeypatch.setattr(module, "device_limits", lambda device: tiles.OF_H100)
    found: dict[str, set] = {"cpu": set(), "meta": set()}

    def record(prepared, *tensors):
        address = [each if each is None else compile_ahead._Pointer(each).data_ptr() for each in tensors]
        if not tensors[0].is_meta:
            address = [each if each is None else each.data_ptr() for each in tensors]
        aligned = [each if each is None else each % 16 == 0 for each in address]
        dtypes = [each if each is None else each.dtype for each in tensors]
        name = prepared.kernel.fn.__name__
        found[tensors[0].device.type].add((name, str(sorted(prepared.constants.items())), str(dtypes), str(aligned)))

    monkeypatch.setattr(launch, "launch", record)
    if activation == "relu":
        checks = [*check_on_device.checks(dtype), *check_on_device.large_checks(dtype)]
    else:
        checks = [*check_on_device.checks_of_activation(activation, dtype)]
    for check in checks:
        for device in found:
            with torch.no_grad(), contextlib.suppress(AssertionError, NotImplementedError, RuntimeError):
                check.function(operations, check.make_case().on(device))
    assert len(found["cpu"]) > 20
    assert sorted(found["cpu"] - found["meta"]) == []
