"""The Triton kernels' first contact with a device: wrong kernels are found, and PyTorch's operations run instead.

The comparison runs through Triton's interpreter here. Its process, and the device, are replaced.
"""

import contextlib
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import kernel_modules
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_interpreter import mended_interpreter  # noqa: F401 (a fixture)

from efficient_densenet import DenseNet, create_model, doctor, kernels
from efficient_densenet.kernels import check_on_device, first_contact, python_process
from efficient_densenet.kernels.activations import TABLE
from efficient_densenet.kernels.comparison import Case, StemCase

pytest.importorskip("triton", reason="needs Triton")
launch, operations, tiles, conv3x3 = kernel_modules("triton_gpu", "launch", "operations", "tiles", "conv3x3")
pytestmark = pytest.mark.usefixtures("mended_interpreter")
GPU = torch.device("cuda", 0)
KERNELS = [
    *("tile_statistics", "combine_statistics", "center"),
    *("affine_activation_pool_forward", "affine_activation_pool_backward"),
    *("batch_norm_grad_input", "finish_backward", "conv1x1_forward", "conv1x1_backward"),
    *("conv3x3_forward", "conv3x3_grad_input", "conv3x3_grad_weight"),
    *("image_statistics", "norm_activation_max_pool_forward", "norm_activation_max_pool_backward_reduce"),
    "norm_activation_max_pool_backward",
]
APPLYING = {name for name in KERNELS if name.startswith(("conv", "affine", "norm", "finish"))}
"""The kernels of operations that apply an activation."""


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def few_sizes(monkeypatch):
    monkeypatch.setattr(check_on_device, "UNALIGNED", [((2, 4, 6), 5, 20)])
    monkeypatch.setattr(check_on_device, "ALIGNED", [((2, 4, 4), 16, 16)])
    monkeypatch.setattr(check_on_device, "ALIGNED_CONV3X3", [((2, 4, 4), 16, 16)])


def _find_fault(dtype: torch.dtype = torch.float32, activation: str = "relu") -> str | None:
    return check_on_device.find_fault("cpu", dtype, "ieee", activation, num_threads=1)


@pytest.mark.usefixtures("few_sizes")
@pytest.mark.parametrize(
    "activation", [pytest.param(name, marks=[] if name == "relu" else pytest.mark.exhaustive) for name in TABLE]
)
def test_every_kernel_is_compared_with_every_activation(activation, monkeypatch):
    launched, original = set(), launch.launch

    def recording(prepared, *tensors):
        assert activation == "relu" or prepared.constants.get("ACTIVATION", activation) == activation
        launched.add(prepared.kernel.fn.__name__)
        return original(prepared, *tensors)

    monkeypatch.setattr(launch, "launch", recording)
    assert _find_fault(activation=activation) is None
    assert launched >= (set(KERNELS) if activation == "relu" else APPLYING)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_large_cases_is_no_fault(dtype, monkeypatch):
    """They are compared on GPUs alone. Where many rows are summed, half precision differs most from the exact sum."""
    large = [each for each in check_on_device.large_checks(dtype) if each.operation == "conv1x1_backward"]
    monkeypatch.setattr(check_on_device, "_checks_on", lambda *_: ([], large))
    assert _find_fault(dtype) is None


def test_nan_is_no_rounding_where_pytorch_s_operations_have_it_too():
    def function(kernels, case) -> list[torch.Tensor]:
        return [case.values if case.dtype is torch.float64 else case.values * math.nan]

    check = check_on_device.Check("center", function, lambda: Case((2, 3), 4, 5))
    assert "differs" in check_on_device._compare(operations, "cpu", 1e-2, check)


def _plant(monkeypatch, name: str, error: Exception | None = None) -> None:
    """Let each launch of the kernel `name` raise the error or, without one, change its output's last element."""

    def launching(prepared, *tensors):
        original(prepared, *tensors)
        if prepared.kernel.fn.__name__ == name:
            if error is not None:
                raise error
            last = tensors[0][tuple(size - 1 for size in tensors[0].shape)]
            last.copy_(last + (1 if last.dtype is torch.int8 else 0.1 * tensors[0].abs().max()))

    original = launch.launch
    monkeypatch.setattr(launch, "launch", launching)


@pytest.mark.usefixtures("few_sizes")
@pytest.mark.parametrize("name", ["conv1x1_forward", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in KERNELS)])
def test_one_wrong_element_of_any_kernel_is_found(name, monkeypatch):
    _plant(monkeypatch, name)
    assert "differs from PyTorch's operations by" in _find_fault()


@pytest.mark.usefixtures("few_sizes")
def test_a_kernel_that_cannot_be_launched_is_named_unless_memory_is_lacking(monkeypatch):
    with monkeypatch.context() as patch:
        _plant(patch, "conv1x1_forward", RuntimeError("Triton Error [CUDA]: invalid argument"))
        assert (
            _find_fault()
            == "conv1x1_forward_with_statistics raises RuntimeError: Triton Error [CUDA]: invalid argument"
        )
    for error in (torch.OutOfMemoryError(), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), OSError()):
        with monkeypatch.context() as patch:
            _plant(patch, "conv1x1_forward", error)
            with pytest.raises(check_on_device.CannotCompareError):
                _find_fault()


@pytest.mark.parametrize("case", [Case((2, 3, 5), 6, 16), StemCase(5, torch.float32)])
def test_a_case_on_a_device_keeps_strides_and_offsets(case):
    moved = vars(case.on("meta"))
    tensors = {name: each for name, each in vars(case).items() if isinstance(each, torch.Tensor)}
    assert len(tensors) > 2
    for name, tensor in tensors.items():
        assert moved[name].is_meta
        assert (moved[name].stride(), moved[name].storage_offset()) == (tensor.stride(), tensor.storage_offset()), name


def test_nan_is_a_difference():
    assert check_on_device._largest_difference([torch.tensor([float("nan"), 1])], [torch.ones(2)]) == float("inf")


def _verdict(fault: str | None = None, device: str = "a GPU", lacks: str | None = None, slower: str = "") -> str:
    """What a process of a comparison prints, beside what others print there."""
    verdict = check_on_device.VERDICT + json.dumps({"device": device, "fault": fault, "lacks": lacks, "slower": slower})
    return f"site customized\n{check_on_device.STARTED}\n{verdict}\nbye\n"


@pytest.fixture
def contact(monkeypatch, tmp_path):
    """A GPU, and what the process of a comparison says: `returncode`, `stdout` and `stderr`; `starts` counts them."""
    said = SimpleNamespace(returncode=0, stdout=_verdict(), stderr="", starts=0, error=None)

    def run(*compared):
        said.starts += 1
        if said.error:
            raise said.error
        return subprocess.CompletedProcess([], said.returncode, said.stdout, said.stderr)

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_contact, "_run", run)
    monkeypatch.setattr(kernels, "_numba_compiles", lambda dtype: True)  # which the empty directory has nothing of
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    first_contact.verdict.cache_clear()
    yield said
    first_contact.verdict.cache_clear()


def _in_another_process(*compared) -> bool:
    first_contact.verdict.cache_clear()
    return first_contact.may_run(GPU, *(compared or (torch.float32,)))


def test_what_was_compared_is_not_compared_again(contact, caplog):
    """Each dtype and each activation is compared when it is first used."""
    assert first_contact.may_run(GPU, torch.float32)
    assert "comparing the Triton kernels for float32 with PyTorch's operations on a GPU once" in caplog.text
    assert first_contact.may_run(torch.device("cuda"), torch.float32, "relu")
    for i, compared in enumerate([(), (torch.bfloat16,), (torch.float32, "silu"), (torch.bfloat16, "silu")], 1):
        for _ in range(2):
            assert _in_another_process(*compared)
            assert contact.starts == i
    contact.stdout = _verdict("conv1x1_forward differs by 1")
    with pytest.warns(UserWarning, match="the Triton kernels for float32 and mish on a GPU"):
        assert not first_contact.may_run(GPU, torch.float32, "mish")
    assert first_contact.may_run(GPU, torch.float32)


@pytest.mark.parametrize(("capability", "ours", "runs"), [((9, 0), 3, True), ((7, 5), 3, False), ((7, 5), 1, True)])
def test_the_faster_kernels_run_where_no_such_card_was_measured(
    capability, ours, runs, contact, monkeypatch, capsys, caplog
):
    monkeypatch.setattr(check_on_device, "LAYER_SHAPE", (1, 2, 2))
    monkeypatch.setattr(check_on_device, "_seconds", lambda each, _: 2 if each is kernels.portable else ours)
    for owner, name in ((check_on_device, "find_fault"), (torch, "set_num_threads")):
        monkeypatch.setattr(owner, name, lambda *_: None)
    monkeypatch.setattr(check_on_device.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check_on_device.main("cpu", "float16", "ieee", "relu", "1")
    contact.stdout = capsys.readouterr().out
    for _ in range(2):
        assert _in_another_process(torch.float16) is runs
    found = "a layer takes 3000.00 ms, but 2000.00 ms by PyTorch's operations"
    assert ("PyTorch's operations run for float16 on a GPU: " + found in caplog.text) is not runs
    assert contact.starts == 1
    said = "Triton, compared" if runs else f"PyTorch's operations, since of the Triton kernels {found}"
    assert f"  float16: {said}" in _lines_of_doctor(monkeypatch)


def test_a_layer_is_timed_forward_and_backward(monkeypatch):
    """Triton's interpreter is the slower one."""
    sizes = {"LAYER_SHAPE": (1, 3, 3), "CONV1X1": (5, 16), "CONV3X3": (16, 4), "ROUNDS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(check_on_device, name, value)
    assert check_on_device.find_slowness("cpu", torch.float32).endswith(" ms by PyTorch's operations")


@pytest.mark.parametrize("activations", [[], ["relu"], ["relu", "mish"]])
def test_kernels_are_chosen_by_their_activations(activations, monkeypatch):
    asked = []
    monkeypatch.setattr(first_contact, "may_run", lambda *arguments: asked.append(arguments))
    values = SimpleNamespace(is_cuda=True, device=GPU, dtype=torch.float32)
    allowed = all(kernels._triton_applies(each, values) for each in activations)
    assert asked == [(GPU, torch.float32, "mish")] * ("mish" in activations)
    assert allowed is ("mish" not in activations)


@pytest.mark.parametrize(
    "part", ["get_device_name", "get_device_capability", "_sources", "_triton_version", "_driver_version", "precision"]
)
def test_another_device_or_version_is_compared_anew(part, contact, monkeypatch):
    assert first_contact.may_run(GPU, torch.float32)
    if part == "precision":
        monkeypatch.setattr(first_contact.convolution, "precision", lambda: "another")
    else:
        owner = first_contact if part.startswith("_") else torch.cuda
        contact.stdout = _verdict(device="another" if part == "get_device_name" else "a GPU")
        monkeypatch.setattr(owner, part, lambda *_: "another")
    assert _in_another_process()
    assert contact.starts == 2


STARTED = check_on_device.STARTED
FAULTS = {
    "conv3x3_forward differs by 1": (0, _verdict("conv3x3_forward differs by 1"), None),
    "the comparison ended with status -6: LLVM ERROR: no": (-6, STARTED, None),
}
UNCERTAIN = {
    "CUDA out of memory": (0, _verdict(lacks="CUDA out of memory"), None),
    "finds another GPU in the place of a GPU": (0, _verdict(device="another GPU"), None),
    "ended with status 0": (0, "", None),  # as where the parent ignores SIGCHLD
    "ended with status -11": (-11, "", None),  # before it has started to compare
    "ended with status -9": (-9, STARTED, None),
    "could not be run": (0, check_on_device.VERDICT + "{", None),
    "timed out": (0, "", subprocess.TimeoutExpired("check", 1)),
}


@pytest.mark.parametrize("found", FAULTS | UNCERTAIN)
def test_a_fault_is_remembered_and_what_says_nothing_of_the_kernels_is_not(found, contact):
    contact.returncode, contact.stdout, contact.error = (FAULTS | UNCERTAIN)[found]
    contact.stderr = "LLVM ERROR: no\n"
    cause = "of what a comparison has found" if found in FAULTS else "they could not be compared"
    with pytest.warns(UserWarning, match=f"^PyTorch's operations.* on a GPU, since {cause}: .*{found}"):
        assert not first_contact.may_run(GPU, torch.float32)
    assert not first_contact.may_run(GPU, torch.float32)  # without a second warning
    contact.returncode, contact.stdout, contact.error = 0, _verdict(), None
    if found in FAULTS:
        with pytest.warns(UserWarning, match="Please report"):
            assert not _in_another_process()
    else:
        assert _in_another_process()
    assert contact.starts == (1 if found in FAULTS else 2)


def test_the_user_decides(contact, monkeypatch):
    for mode in "trust", "off":
        monkeypatch.setenv(first_contact.VARIABLE, mode)
        assert first_contact.may_run(GPU, torch.float32) == (mode == "trust")
    assert contact.starts == 0
    monkeypatch.setenv(first_contact.VARIABLE, "yes")
    with pytest.raises(ValueError, match="EFFICIENT_DENSENET_TRITON is 'yes', but must be one of check, trust, off"):
        first_contact.may_run(GPU, torch.float32)


def test_traced_tensors_start_no_comparison(contact):
    with FakeTensorMode():
        assert not kernels.triton_supports(torch.empty(2, 2, device="cuda"))
    assert contact.starts == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_process_has_the_paths_of_this_one_and_says_what_it_lacks(tmp_path, monkeypatch):
    """Modules in the working directory are none of its own."""
    (tmp_path / "dataclasses.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    verdict = first_contact._verdict_of(first_contact._run(0, torch.float32, "ieee", "relu"), "a GPU")
    assert not verdict.certain
    assert "NVIDIA" in verdict.fault or "CUDA" in verdict.fault, verdict
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert "no Python interpreter to start" in first_contact._compare(0, torch.float32, "ieee", "relu").fault


@pytest.mark.parametrize("seconds", [1, -9])
def test_a_comparison_that_never_ends_is_ended(seconds, monkeypatch):
    """It ends itself or, where it cannot or has not started yet, is ended ten seconds later."""
    command = python_process.command
    monkeypatch.setattr(python_process, "command", lambda module, *words: command(Path(__file__).stem, *words))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(first_contact, "SECONDS", seconds)
    verdict = first_contact._compare(0, torch.float32, "ieee", "relu")
    assert not verdict.certain
    assert "timed out" in verdict.fault or (seconds > 0 and "ended with status 1" in verdict.fault)


def main(*arguments: str) -> None:
    """A comparison that never ends."""
    check_on_device.find_fault = lambda *_: time.sleep(600)
    torch.zeros = torch.cuda.get_device_name = lambda *_, **__: None
    check_on_device.main(*arguments)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, "ieee")]
)
def test_the_kernels_of_a_step_are_compared_with_the_constants_of_that_step(dtype, precision, monkeypatch):
    """Tiles are those of an H100."""

    def launching(prepared, *tensors):
        dtypes = [str(each.dtype) for each in tensors]
        launched.add((prepared.kernel.fn.__name__, *dtypes, str(sorted(prepared.constants.items()))))

    launched: set = set()
    for module in tiles, conv3x3:
        monkeypatch.setattr(module, "device_limits", lambda device: tiles.OF_H100)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    monkeypatch.setattr(kernels, "triton_supports", lambda values: True)
    monkeypatch.setattr(launch, "launch", launching)
    for check in (*check_on_device.checks(dtype), *check_on_device.large_checks(dtype)):
        with torch.no_grad(), contextlib.suppress(AssertionError):  # of a case that finds memory that nobody wrote
            check.function(operations, check.make_case())
    compared = set(launched)
    for name, batch_size, size in (("densenet121", 4, 224), ("densenet161", 2, 224), ("densenet_bc_100_12", 16, 32)):
        model, images = create_model(name, efficient="shared"), torch.zeros(batch_size, 3, size, size)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            output = model(images)
        output.float().sum().backward()
        assert sorted(launched - compared) == [], name


def _lines_of_doctor(monkeypatch, **options) -> list[str]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("triton.runtime.driver", mock.Mock())
    kernels.has_triton.cache_clear()
    return list(doctor.report(**options))


def test_the_doctor_says_what_runs_on_each_gpu(contact, monkeypatch):
    contact.stdout = _verdict("conv3x3_forward differs by 1")
    with pytest.warns(UserWarning, match="conv3x3_forward"):
        first_contact.may_run(GPU, torch.bfloat16)
    lines = _lines_of_doctor(monkeypatch)
    assert "GPU 0: a GPU, compute capability 9.0" in lines
    assert "  float32, ieee: Triton, if they pass the comparison: the first step compares, as does --compare" in lines
    assert "  bfloat16: PyTorch's operations, since of the Triton kernels conv3x3_forward differs by 1" in lines
    contact.stdout = _verdict(lacks="CUDA out of memory")
    with pytest.warns(UserWarning, match="out of memory"):
        lines = _lines_of_doctor(monkeypatch, compare=True)
    assert any(line.endswith("since the Triton kernels could not be compared: CUDA out of memory") for line in lines)
    monkeypatch.setenv(first_contact.VARIABLE, "trust")
    assert "  bfloat16: Triton, unchecked" in list(doctor.report(compare=True))
    for capability, names in ((7, 0), ["float32", "float32", "float16"]), ((6, 1), ["PyTorch's operations"]):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, capability=capability: capability)
        lines = [line for line in _lines_of_doctor(monkeypatch) if line.startswith("  ")]
        assert [re.match(r"  ([\w' ]+)", line)[1] for line in lines] == names


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
