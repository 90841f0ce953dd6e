"""Replayed launches pass a Triton kernel's launcher what Triton passes: seen by a driver that launches nothing."""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import contextlib
import importlib
from array import array
from types import SimpleNamespace

import pytest
import torch
from triton_interpreter import language_attributes, restore_language

from efficient_densenet.kernels import launches

triton = pytest.importorskip("triton", reason="needs Triton")
tl = triton.language
GPUTarget = importlib.import_module("triton.backends.compiler").GPUTarget
JITFunction = importlib.import_module("triton.runtime.jit").JITFunction
launching = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.launch")

LANGUAGE = language_attributes()  # as this module is imported: before any test

LOADED = 5 if launching._version() >= (3, 4) else 4
"""What Triton reads of a loaded kernel: module, function, registers, spills, and threads."""


class Tensor:
    """What Triton reads of a tensor on a GPU."""

    is_cuda, is_meta = True, False

    def __init__(self, address: int = 1600, dtype: torch.dtype = torch.float32, device: int = 0) -> None:
        self.address, self.dtype, self.device = address, dtype, device

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device


class Driver:
    """A driver for GPUs that are not there. Its launchers record what they are given."""

    def __init__(self) -> None:
        self.device, self.launches, self.loaded, self.compiled = 0, [], [], []
        self.utils = SimpleNamespace(
            load_binary=self.load_binary,
            get_device_properties=lambda device: {"max_shared_mem": 101376},
            unload_module=lambda module: None,
        )

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.launches.append((self.device, *arguments))

    def load_binary(self, name, binary, *_):
        self.loaded.append(binary)
        return (1, len(self.loaded), 32, 0, 1024)[:LOADED]

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 70 + device

    def get_current_target(self):
        return GPUTarget("cuda", 80, 32)

    def get_device_interface(self):
        return torch.cuda


class Recorder:
    """Sees launches, whose tensors lie each 16 bytes after the start of a memory, and replays them."""

    def __init__(self) -> None:
        self.tensors, self.recorded = [], []

    def argument(self, tensor):
        self.tensors.append(tensor)
        return SimpleNamespace(memory=len(self.tensors) - 1, offset=16)

    def launched(self, kind, kernel, arguments):
        self.kind = kind
        self.recorded.append((kernel, arguments))

    def replay(self) -> None:
        addresses = array("q", [tensor.data_ptr() - 16 for tensor in self.tensors])
        run = SimpleNamespace(addresses=addresses, values=self.tensors, tensor=lambda each: self.tensors[each.memory])
        self.kind(self.recorded)(run)


def scaled(output, values, num_rows, factor, ADDEND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    result = ADDEND + tl.load(values + row, row < num_rows, 0.0) * factor
    tl.store(output + row, result, row < num_rows)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """The driver; `compiled` has what each launch of Triton's own has returned."""
    stub = Driver()
    restore_language(monkeypatch, LANGUAGE)

    @contextlib.contextmanager
    def on_device(device):
        before, stub.device = stub.device, device
        yield
        stub.device = before

    def run(self, *args, **kwargs):
        stub.compiled.append(run_of_triton(self, *args, **kwargs))
        return stub.compiled[-1]

    run_of_triton = JITFunction.run
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", stub.get_current_device)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: on_device(tensor.get_device()))
    active = dict(vars(launching.driver))
    launching.driver.set_active(stub)
    yield stub
    for kernel in stub.compiled:
        kernel.module = None  # there is nothing to unload
    vars(launching.driver).update(active)


@pytest.fixture
def kernel():
    return JITFunction(scaled, do_not_specialize=["num_rows"])


def _recorded(kernel, *launched) -> Recorder:
    """A recorder that has seen launches of the kernel."""
    recorder = Recorder()
    with launches.seen_by(recorder):
        for changed in launched:
            _launch(kernel, **changed)
    return recorder


def _launch(kernel, grid=(5,), address=1600, dtype=torch.float32, device=0, num_rows=32, factor=1, **constants):
    constants = {"ADDEND": 2.0, "BLOCK": 32} | constants
    prepared = launching.Launch(kernel, grid, (num_rows, factor), constants)
    launching.launch(prepared, Tensor(16, device=device), Tensor(address, dtype, device))


def _passed(launch) -> list:
    """What the launcher was given, but for the hooks and what they are told; a tensor as its address."""
    device, *arguments = launch
    arguments[6:9] = []
    return [device, *(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)]


LAUNCHES = [
    {},
    {"dtype": torch.bfloat16},
    {"address": 1604},  # not aligned
    {"address": 3200},
    {"num_rows": 2**31},  # an int64
    {"factor": 0.5},
    {"num_warps": 8},
    {"grid": (2, 3, 4)},
]


def test_replays_pass_what_triton_passes(driver, kernel):
    recorder = _recorded(kernel, *LAUNCHES)
    direct = list(driver.launches)
    recorder.replay()
    replayed = driver.launches[len(direct) :]
    assert [*map(_passed, replayed)] == [*map(_passed, direct)]
    assert {each[7:10] for each in replayed} == {(None, None, None)}
    assert len(driver.compiled) == len(direct) == len(LAUNCHES)


def test_another_device_than_the_current_one(driver, kernel):
    recorder = _recorded(kernel, {"device": 1})
    recorder.replay()
    assert _passed(driver.launches[1]) == _passed(driver.launches[0])
    assert (driver.launches[1][0], driver.device) == (1, 0)


def test_a_launch_is_triton_s_own_while_hooks_observe_launches(driver, kernel, monkeypatch):
    recorder, owner = _recorded(kernel, {}), launching._hook_owner()
    chain = owner.launch_enter_hook
    with monkeypatch.context() as patch:
        if hasattr(chain, "calls"):
            patch.setattr(chain, "calls", [print])
        else:
            patch.setattr(owner, "launch_enter_hook", print)
        recorder.replay()
    assert len(driver.compiled) == 2
    recorder.replay()
    assert len(driver.compiled) == 2


def test_kernels_with_hooks_and_unknown_versions_of_triton_are_launched_by_triton(driver, kernel, monkeypatch):
    kernel.pre_run_hooks.append(lambda *_, **__: None)
    _recorded(kernel, {}).replay()
    kernel.pre_run_hooks.clear()
    monkeypatch.setattr(triton, "__version__", "4.0.1")
    recorder = _recorded(kernel, {}, {})
    with pytest.warns(UserWarning, match="Triton 4.0.1 is not known") as caught:
        recorder.replay()
    assert len(caught) == 1
    assert len(driver.compiled) == 2 + 2 * 2


def test_this_version_of_triton_is_known():
    assert launching._is_known(), (
        f"Triton {triton.__version__} is new: read how `JITFunction.run` calls `CompiledKernel.run` there, and widen "
        "_is_known"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_replays_launches():
    kernel, recorder = triton.jit(do_not_specialize=["num_rows"])(scaled), Recorder()
    values, outputs = torch.arange(40.0, device="cuda"), torch.zeros(3, 40, device="cuda")
    with launches.seen_by(recorder):
        for num_rows, output in zip((40, 30, 20), outputs, strict=True):
            launching.launch(
                launching.Launch(kernel, (2,), (num_rows - 1, 2), {"ADDEND": 0.5, "BLOCK": 32}), output, values
            )
    expected = outputs.clone()
    recorder.replay()
    assert torch.equal(outputs, expected)
    assert torch.equal(outputs[0], torch.where(values < 39, values * 2 + 0.5, 0))
