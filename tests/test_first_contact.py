"""The Triton kernels' first contact with a device: wrong kernels are found, and PyTorch's operations run instead.

The comparison runs through Triton's interpreter here. Its process, and the device, are replaced.
"""

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import kernel_modules
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_interpreter import bfloat16_in_the_interpreter  # noqa: F401 (a fixture)

from efficient_densenet import DenseNet, doctor, kernels
from efficient_densenet.kernels import check_on_device, disk_cache, first_contact

pytest.importorskip("triton", reason="needs Triton")
(launch,) = kernel_modules("triton_gpu", "launch")
pytestmark = pytest.mark.usefixtures("bfloat16_in_the_interpreter")
GPU = torch.device("cuda", 0)
KERNELS = [
    *("tile_statistics", "combine_statistics", "affine_relu_pool_forward", "affine_relu_pool_backward"),
    *("batch_norm_grad_input", "finish_backward", "conv1x1_forward", "conv1x1_backward"),
    *("conv3x3_forward", "conv3x3_grad_input", "conv3x3_grad_weight"),
    *("image_statistics", "norm_relu_max_pool_forward", "norm_relu_max_pool_backward_reduce"),
    "norm_relu_max_pool_backward",
]


def _name(kernel) -> str:
    return kernel.fn.__name__


@pytest.fixture
def few_sizes(monkeypatch):
    monkeypatch.setattr(check_on_device, "SIZES", [((2, 4, 6), 5, 20)])


def _find_fault(dtype: torch.dtype = torch.float32, precision: str = "ieee") -> str | None:
    return check_on_device.find_fault("cpu", dtype, precision, num_threads=1)


@pytest.mark.usefixtures("few_sizes")
def test_every_kernel_is_compared(monkeypatch):
    launched, original = set(), launch.launch

    def recording(kernel, *arguments, **constants):
        launched.add(_name(kernel))
        return original(kernel, *arguments, **constants)

    monkeypatch.setattr(launch, "launch", recording)
    assert _find_fault() is None
    assert launched == set(KERNELS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "ieee"), (torch.float16, "ieee")],
)
def test_the_kernels_have_no_fault(dtype, precision):
    assert _find_fault(dtype, precision) is None


def _plant(monkeypatch, name: str, wrong) -> None:
    """Let `wrong` change the tensors of the kernel `name` after each launch, or raise before it."""
    original = launch.launch

    def launching(kernel, grid, *arguments, **constants):
        original(kernel, grid, *arguments, **constants)
        if _name(kernel) == name:
            wrong(arguments)

    monkeypatch.setattr(launch, "launch", launching)


def _change_last_element(arguments) -> None:
    output = arguments[0]
    last = output[tuple(size - 1 for size in output.shape)]
    last.copy_(last + (1 if output.dtype is torch.int8 else 0.1 * output.abs().max()))


@pytest.mark.usefixtures("few_sizes")
@pytest.mark.parametrize(
    "name",
    [
        "conv1x1_forward",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in KERNELS if name != "conv1x1_forward"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)])
def test_one_wrong_element_of_any_kernel_is_found(name, dtype, monkeypatch):
    _plant(monkeypatch, name, _change_last_element)
    fault = _find_fault(dtype)
    assert fault is not None
    assert "differs from PyTorch's operations by" in fault


@pytest.mark.usefixtures("few_sizes")
@pytest.mark.parametrize("error", ["CompilationError", "Triton Error [CUDA]: invalid argument"])
def test_a_kernel_that_cannot_be_compiled_or_launched_is_named(error, monkeypatch):
    def raising(arguments):
        raise RuntimeError(error)

    _plant(monkeypatch, "conv3x3_grad_input", raising)
    assert _find_fault() == f"conv3x3_backward raises RuntimeError: {error}"


def test_nan_is_a_difference():
    assert check_on_device._largest_difference([torch.tensor([float("nan"), 1])], [torch.ones(2)]) == float("inf")


@pytest.fixture
def contact(monkeypatch, tmp_path):
    """A GPU, and what the process of a comparison says: `returncode`, `stdout` and `stderr`; `starts` counts them."""
    said = SimpleNamespace(returncode=0, stdout="\n", stderr="", starts=0, error=None)

    def run(command, **options):
        said.starts += 1
        if said.error:
            raise said.error
        return subprocess.CompletedProcess(command, said.returncode, said.stdout, said.stderr)

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_contact.subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    first_contact._fault.cache_clear()
    yield said
    first_contact._fault.cache_clear()


def _in_another_process() -> bool:
    first_contact._fault.cache_clear()
    return first_contact.may_run(GPU, torch.float32)


def test_what_was_compared_is_not_compared_again(contact):
    assert first_contact.may_run(GPU, torch.float32)
    assert first_contact.may_run(torch.device("cuda"), torch.float32)
    assert _in_another_process()
    assert contact.starts == 1
    assert first_contact.may_run(GPU, torch.bfloat16)
    assert contact.starts == 2


@pytest.mark.parametrize(
    "part", ["get_device_name", "get_device_capability", "_sources", "_triton_version", "precision"]
)
def test_another_device_or_version_is_compared_anew(part, contact, monkeypatch):
    assert first_contact.may_run(GPU, torch.float32)
    if part == "precision":
        monkeypatch.setattr(first_contact.convolution, "precision", lambda: "another")
    else:
        owner = first_contact if part.startswith("_") else torch.cuda
        monkeypatch.setattr(owner, part, lambda *_: "another")
    assert _in_another_process()
    assert contact.starts == 2


@pytest.mark.parametrize(
    ("returncode", "stdout", "stderr", "found"),
    [
        (0, "conv3x3_forward differs by 1\n", "", "found: conv3x3_forward differs by 1"),
        (-6, "", "LLVM ERROR: no\n", "found: the comparison ended with status -6: LLVM ERROR: no"),
        (1, "", "", "found: the comparison ended with status 1: without a message"),
    ],
)
def test_a_fault_keeps_the_kernels_from_running_and_is_remembered(returncode, stdout, stderr, found, contact):
    contact.returncode, contact.stdout, contact.stderr = returncode, stdout, stderr
    message = rf"^the Triton kernels for float32 do not run on a GPU: {found}\. The shared .* unchecked; please report"
    with pytest.warns(UserWarning, match=message):
        assert not first_contact.may_run(GPU, torch.float32)
    assert not first_contact.may_run(GPU, torch.float32)  # without a second warning
    with pytest.warns(UserWarning, match=message):
        assert not _in_another_process()
    assert contact.starts == 1


@pytest.mark.parametrize(
    ("returncode", "error", "found"),
    [
        (first_contact.COULD_NOT_CHECK, None, "CUDA out of memory"),
        (-9, None, "ended with status -9"),
        (0, subprocess.TimeoutExpired("check", 1), "took more than 300 s"),
        (0, OSError("no such file"), "could not be started"),
    ],
)
def test_what_says_nothing_about_the_kernels_is_tried_again(returncode, error, found, contact):
    contact.returncode, contact.error, contact.stdout = returncode, error, "CUDA out of memory"
    with pytest.warns(UserWarning, match=f"could not compare them with PyTorch's operations: .*{found}"):
        assert not first_contact.may_run(GPU, torch.float32)
    contact.returncode, contact.error, contact.stdout = 0, None, ""
    assert _in_another_process()
    assert contact.starts == 2


def test_a_frozen_application_starts_nothing(contact, monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.warns(UserWarning, match="no Python interpreter to start"):
        assert not first_contact.may_run(GPU, torch.float32)
    assert contact.starts == 0


@pytest.mark.parametrize(("mode", "runs"), [("trust", True), ("off", False)])
def test_the_user_decides(mode, runs, contact, monkeypatch):
    monkeypatch.setenv(first_contact.VARIABLE, mode)
    assert first_contact.may_run(GPU, torch.float32) == runs
    assert contact.starts == 0


def test_an_unknown_mode_is_refused(contact, monkeypatch):
    monkeypatch.setenv(first_contact.VARIABLE, "yes")
    with pytest.raises(ValueError, match="EFFICIENT_DENSENET_TRITON is 'yes', but must be one of check, trust, off"):
        first_contact.may_run(GPU, torch.float32)


def test_one_of_several_processes_compares(contact, tmp_path):
    """The others wait for its verdict."""
    code = f"""from {disk_cache.__package__} import disk_cache
with disk_cache.lock("triton_verdict"):
    print("locked")
"""
    with disk_cache.lock("triton_verdict"):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        other = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=8)
    assert other.communicate(timeout=60)[0] == "locked\n"


def test_traced_tensors_start_no_comparison(contact):
    with FakeTensorMode():
        assert not kernels.triton_supports(torch.empty(2, 2, device="cuda"))
    assert contact.starts == 0


@pytest.mark.exhaustive
def test_the_comparison_is_a_process_that_prints_its_verdict(monkeypatch):
    """On a CPU it has no GPU to compare on, and says so."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", check_on_device.__name__, "cuda:0", "float32", "ieee"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == first_contact.COULD_NOT_CHECK
    assert "NVIDIA" in done.stdout or "CUDA" in done.stdout


def test_the_doctor_says_what_runs_on_each_gpu(contact, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(kernels, "has_triton", lambda device: True)
    contact.stdout = "conv3x3_forward differs by 1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first_contact.may_run(GPU, torch.bfloat16)
    lines = list(doctor.report())
    assert "GPU 0: a GPU, compute capability 9.0" in lines
    assert (
        "  float32: Triton, not compared with PyTorch's operations yet: --compare does, as does the first step" in lines
    )
    assert "  bfloat16: PyTorch's operations, since of the Triton kernels conv3x3_forward differs by 1" in lines
    contact.stdout = ""
    assert "  float32: Triton, compared" in list(doctor.report(compare=True))


def test_the_doctor_runs_without_a_gpu_and_compiles_the_kernels_of_a_model(monkeypatch, capsys):
    model = DenseNet(4, (2,), num_init_features=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["doctor", "--model", "densenet121", "--batch_size", "2", "--image_size", "8"])
    monkeypatch.setattr(doctor, "create_model", lambda name: model)
    doctor.main()
    printed = capsys.readouterr().out
    assert "GPU: PyTorch finds none" in printed
    assert "compiled the kernels of densenet121 on cpu" in printed
    assert all(parameter.grad is not None for parameter in model.parameters())
