"""Later launches of a Triton kernel pass its launcher what Triton passes: seen by a driver that launches nothing."""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import contextlib
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from triton_interpreter import language_attributes, restore_language

from efficient_densenet import kernels

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


def scaled(output, values, num_rows, factor, ADDEND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    result = ADDEND
    if values is not None:
        result += tl.load(values + row, row < num_rows, 0.0) * factor
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
    monkeypatch.setattr(launching, "_launchers", {})
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", stub.get_current_device)
    monkeypatch.setattr(torch.cuda, "device", on_device)
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


def _launched(driver) -> list:
    """What the launcher was given last, but for the hooks and what they are told; a tensor as its address."""
    device, *arguments = driver.launches[-1]
    arguments[6:9] = []
    return [device, *(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)]


LAUNCHES = {
    "first": {},
    "another dtype": {"dtype": torch.bfloat16},
    "an unaligned tensor": {"address": 1604},
    "a size beyond int32": {"num_rows": 2**31},
    "a factor that is no integer": {"factor": 0.5},
    "no tensor": {"address": None},
    "another constant": {"ADDEND": 3.0},
    "another option": {"num_warps": 8},
    "another device": {"device": 1},
    "another grid": {"grid": (2, 3, 4)},
    "another size": {"num_rows": 48},
    "another address": {"address": 3200},
}


def _launch(kernel, grid=(5,), address=1600, dtype=torch.float32, device=0, num_rows=32, factor=1, **constants):
    output = Tensor(16, device=device)
    values = None if address is None else Tensor(address, dtype, device)
    constants = {"ADDEND": 2.0, "BLOCK": 32} | constants
    prepared = launching.cached_launch(kernel, grid, num_rows, factor, **constants)
    launching.launch(prepared, output, values)
    return prepared


def test_later_launches_pass_what_triton_passes(driver, kernel):
    expected = {}
    for name, changed in LAUNCHES.items():
        _launch(kernel, **changed)
        expected[name] = _launched(driver)
    assert expected["first"][:6] == [0, 5, 1, 1, 70, 1]
    assert expected["another grid"][1:4] == [2, 3, 4]
    assert expected["another device"][4] == 71
    by_triton, functions = len(driver.compiled), {each[5] for each in expected.values()}
    assert by_triton == len(LAUNCHES) - 3  # the grid, the last size and the last address need no other kernel
    assert len(functions) >= 7  # the compiled kernels are others
    for name, changed in reversed(LAUNCHES.items()):
        _launch(kernel, **changed)
        assert _launched(driver) == expected[name], name
        assert driver.launches[-1][7:10] == (None, None, None)
    assert len(driver.compiled) == by_triton
    assert driver.device == 0


def test_kernels_with_one_signature_are_not_confused(driver, kernel):
    other = JITFunction(scaled, do_not_specialize=["num_rows"])
    for each in (kernel, other, kernel, other):
        _launch(each)
    assert len(driver.compiled) == 2
    assert [each[5] for each in driver.launches] == [1, 2, 1, 2]


def test_a_launch_is_triton_s_own_while_hooks_observe_launches(driver, kernel):
    runtime = launching._HOOK_OWNER
    for _ in range(2):
        _launch(kernel)
    assert len(driver.compiled) == 1
    chain = runtime.launch_enter_hook
    try:
        if hasattr(chain, "add"):
            chain.add(print)
        else:
            runtime.launch_enter_hook = print
        _launch(kernel)
    finally:
        if hasattr(chain, "remove"):
            chain.remove(print)
        runtime.launch_enter_hook = chain
    assert len(driver.compiled) == 2
    _launch(kernel)
    assert len(driver.compiled) == 2


def test_kernels_with_hooks_of_their_own_and_unknown_versions_of_triton_launch_as_triton_does(
    driver, kernel, monkeypatch
):
    kernel.pre_run_hooks.append(lambda *_, **__: None)
    for _ in range(2):
        assert not _launch(kernel).launchers
    kernel.pre_run_hooks.clear()
    monkeypatch.setattr(triton, "__version__", "4.0.1")
    with pytest.warns(UserWarning, match="Triton 4.0.1 is not known"):
        assert not _launch(kernel).launchers
    assert not _launch(kernel).launchers  # without a second warning
    assert len(driver.compiled) == 4


def _imported_anew():
    """Another copy of the module."""
    spec = importlib.util.spec_from_file_location(launching.__name__, launching.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@pytest.mark.parametrize("missing", ["triton.knobs", "triton.compiler.CompiledKernel"])
def test_a_triton_that_lacks_private_names_launches_kernels_itself(missing, driver, kernel, monkeypatch):
    owner, _, name = missing.rpartition(".")
    if not hasattr(importlib.import_module(owner), name):
        pytest.skip("this version never had it")
    with monkeypatch.context() as without:
        without.delattr(importlib.import_module(owner), name)
        copy = _imported_anew()
    prepared = copy.Launch(kernel, (5,), 32, 1, ADDEND=2.0, BLOCK=32)
    with pytest.warns(UserWarning, match="is not known to this version of efficient_densenet"):
        copy.launch(prepared, Tensor(16), Tensor())
    copy.launch(prepared, Tensor(16), Tensor())
    assert len(driver.compiled) == 2


def test_a_triton_that_cannot_be_imported_is_not_used(monkeypatch):
    def fail(name):
        raise AttributeError("module 'triton' has no attribute 'language'")

    monkeypatch.setattr(kernels.importlib, "import_module", fail)
    with pytest.warns(UserWarning, match="cannot be imported here .*no attribute 'language'.* slower"):
        assert not kernels._imports_triton.__wrapped__()


def test_this_version_of_triton_is_known():
    assert launching._is_known(), (
        f"Triton {triton.__version__} is new: read how `JITFunction.run` calls `CompiledKernel.run` there, and widen "
        "_is_known"
    )


@pytest.mark.parametrize(("version", "num_constants"), [("3.2.0", 0), ("3.3.1", 2), ("3.9.0", 2)])
def test_whether_constants_are_passed_depends_on_the_version_of_triton(
    version, num_constants, driver, kernel, monkeypatch
):
    monkeypatch.setattr(triton, "__version__", version)
    (launcher,) = _launch(kernel).launchers.values()
    assert launcher.constants == (2.0, 32)[:num_constants]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_runs_later_launches():
    kernel = triton.jit(do_not_specialize=["num_rows"])(scaled)
    values = torch.arange(40.0, device="cuda")
    for num_rows in (40, 30, 20):
        output = torch.zeros_like(values)
        prepared = launching.Launch(kernel, (2,), num_rows - 1, 2, ADDEND=0.5, BLOCK=32)
        launching.launch(prepared, output, values[1:])
        expected = torch.where(values < num_rows - 1, values * 2 + 2.5, 0)
        assert torch.equal(output, expected)
