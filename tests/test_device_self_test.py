"""The device self-test: wrong kernels are found, and PyTorch's operations run instead; slow ones are timed.

The kernels run through Triton's interpreter here. The process of a test, and the device, are replaced.
"""

import contextlib
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import kernel_modules
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_interpreter import mended_interpreter  # noqa: F401 (a fixture)

from efficient_densenet import DenseNet, doctor, kernels
from efficient_densenet.kernels import device_self_test
from efficient_densenet.kernels.activations import TABLE
from efficient_densenet.kernels.comparison import Case

triton = pytest.importorskip("triton", reason="needs Triton")
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


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def _find_failure(dtype: torch.dtype = torch.float32, activation: str = "relu") -> str | None:
    return device_self_test.find_failure("cpu", dtype, "ieee", activation, num_threads=1)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # by the interpreter's NumPy
@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", [name for name in TABLE if name != "relu"])
def test_every_kernel_that_applies_an_activation_is_compared_with_each(activation, monkeypatch):
    launched, original = set(), launch.launch
    monkeypatch.setattr(launch, "launch", lambda p, *each: launched.add(p.kernel.fn.__name__) or original(p, *each))
    assert _find_failure(activation=activation) is None
    assert launched >= {name for name in KERNELS if name.startswith(("conv", "affine", "norm", "finish"))}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_large_cases_is_no_failure(dtype, monkeypatch):
    """They are compared on GPUs alone. Where many rows are summed, half precision differs most from the exact sum."""
    large = (each for each in device_self_test.large_checks("cpu", dtype) if each[0] == "conv1x1_backward")
    monkeypatch.setattr(device_self_test, "checks", lambda *_: large)
    assert _find_failure(dtype) is None


def test_nan_is_no_rounding_where_pytorch_s_operations_have_it_too():
    def function(kernels, case) -> list[torch.Tensor]:
        return [case.values if case.dtype is torch.float64 else case.values * math.nan]

    with mock.patch.dict(device_self_test.OPERATIONS, center=function):
        assert "differs" in device_self_test._compare(operations, 1e-2, ("center", Case((2, 3), 4, 5)))
    assert device_self_test._largest_difference([torch.tensor([math.nan, 1])], [torch.ones(2)]) == math.inf


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


@pytest.mark.parametrize("name", ["conv1x1_forward", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in KERNELS)])
def test_one_wrong_element_of_any_kernel_is_found_and_an_error_is_told(name, monkeypatch):
    monkeypatch.setattr(device_self_test, "UNALIGNED", [((2, 4, 6), 5, 12)])
    monkeypatch.setattr(device_self_test, "ALIGNED", [((2, 4, 4), 16, 16)])
    with monkeypatch.context() as patch:
        _plant(patch, name)
        assert "differs from PyTorch's operations by" in _find_failure()
    _plant(monkeypatch, name, OSError("no memory"))
    with pytest.raises(RuntimeError, match="raises OSError: no memory"):
        _find_failure()


def _printed(failure: str = "", certain: bool = True, seconds: tuple[float, ...] = (1, 2, 3)) -> str:
    """What a process of a test prints, beside what others print there."""
    result = device_self_test.Result(failure, certain, seconds)
    return f"site customized\n{device_self_test.RESULT}{json.dumps(result)}\nbye\n"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU, and what the process of a test says: `returncode`, `stdout` and `error`; `starts` counts them."""
    said = SimpleNamespace(returncode=0, stdout=_printed(), starts=0, error=None)

    def run(*command, **options):
        said.starts += 1
        if said.error:
            raise said.error
        return subprocess.CompletedProcess([], said.returncode, said.stdout, "LLVM ERROR: no\n")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(device_self_test.subprocess, "run", run)
    monkeypatch.setattr(kernels, "_numba_compiles", lambda dtype: True)  # which the empty directory has nothing of
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device_self_test.result.cache_clear()
    yield said
    device_self_test.result.cache_clear()


def _in_another_process(*tested) -> bool:
    device_self_test.result.cache_clear()
    return device_self_test.may_run(GPU, *(tested or (torch.float32,)))


def test_what_was_tested_is_not_tested_again(gpu, monkeypatch, caplog):
    """Each dtype and each activation is tested at its first use, and again on another device or in another version."""
    for i, tested in enumerate([(torch.float32,), (torch.bfloat16,), (torch.float32, "silu")], 1):
        assert all(_in_another_process(*tested) for _ in range(2))
        assert gpu.starts == i
    assert "testing the Triton kernels for float32 on a GPU once" in caplog.text
    sources = SimpleNamespace(sha256=lambda text: SimpleNamespace(hexdigest=lambda: "another"))
    for owner, name, another in (
        (torch.cuda, "get_device_name", lambda *_: "another"),
        (device_self_test.convolution, "precision", lambda: "tf32"),
        (triton, "__version__", "another"),
        (device_self_test, "hashlib", sources),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, another)
            starts = gpu.starts
            assert _in_another_process()
            assert gpu.starts == starts + 1, name
    gpu.stdout = _printed("conv1x1_forward differs by 1")
    with pytest.warns(UserWarning, match="the Triton kernels for float32 and mish on a GPU"):
        assert not device_self_test.may_run(GPU, torch.float32, "mish")
    assert _in_another_process()


@pytest.mark.parametrize(
    ("seconds", "runs", "ratio"), [((1, 2, 1), True, None), ((3, 2, 4), False, None), ((3, 2, 1), False, "2.0")]
)
def test_the_faster_kernels_run_and_a_warning_says_what_plain_takes(seconds, runs, ratio, gpu, monkeypatch, caplog):
    gpu.stdout = _printed(seconds=seconds)
    costs = f"takes about {ratio} times the time of efficient=False for float16 on a GPU: a layer takes"
    with pytest.warns(UserWarning, match=costs) if ratio else contextlib.nullcontext():
        assert _in_another_process(torch.float16) is runs
    times = "a layer takes {:.2f} ms by Triton's kernels, {:.2f} ms by PyTorch's operations, {:.2f} ms by plain modules"
    times = times.format(*(1000 * each for each in seconds))
    assert (f"in the place of the Triton kernels for float16 on a GPU: {times}" in caplog.text) is not runs
    said = f"Triton, tested; {times}" if runs else f"PyTorch's operations, since of the Triton kernels {times}"
    assert f"  float16: {said}" in _lines_of_doctor(monkeypatch)


@pytest.mark.parametrize("failure", [None, "one differs"])
def test_a_process_compares_and_times_a_layer(failure, monkeypatch, capsys):
    """By Triton's interpreter, which is the slowest; kernels that failed are not timed."""
    monkeypatch.setattr(device_self_test, "LAYER", ((1, 3, 3), 8, 16, 4))
    monkeypatch.setattr(device_self_test, "find_failure", lambda *_: failure)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    device_self_test.main("cpu", "a GPU", "float32", "ieee", "relu")
    done = subprocess.CompletedProcess([], 0, capsys.readouterr().out)
    with mock.patch("subprocess.run", return_value=done):
        found = device_self_test._test(0, torch.float32, "ieee", "relu")
    by_triton, portable, plain = found.seconds
    assert (found.failure, found.certain, found.passed) == (failure or "", True, False)
    assert by_triton > portable > 0 < plain
    assert (by_triton == math.inf) is bool(failure)
    device_self_test.main("cpu", "another", "float32", "ieee", "relu")
    assert "finds a GPU in the place of another: set CUDA_VISIBLE_DEVICES" in capsys.readouterr().out


@pytest.mark.parametrize("activations", [[], ["relu"], ["relu", "mish"]])
def test_kernels_are_chosen_by_their_activations(activations, monkeypatch):
    asked = []
    monkeypatch.setattr(device_self_test, "may_run", lambda *arguments: asked.append(arguments))
    values = SimpleNamespace(is_cuda=True, device=GPU, dtype=torch.float32)
    allowed = all(kernels._triton_applies(each, values) for each in activations)
    assert asked == [(GPU, torch.float32, "mish")] * ("mish" in activations)
    assert allowed is ("mish" not in activations)


UNCERTAIN = {
    "CUDA out of memory": (0, _printed("CUDA out of memory", certain=False), None),
    "ended with status -6: LLVM ERROR: no": (-6, "", None),
    "could not be run": (0, device_self_test.RESULT + "{", None),
    "timed out": (0, "", subprocess.TimeoutExpired("test", 1)),
}


@pytest.mark.parametrize("found", ["conv3x3_forward differs by 1", *UNCERTAIN])
def test_a_difference_is_remembered_and_what_may_say_nothing_of_the_kernels_is_not(found, gpu):
    gpu.returncode, gpu.stdout, gpu.error = UNCERTAIN.get(found, (0, _printed(found), None))
    cause = "they could not be tested" if found in UNCERTAIN else "of what a test has found"
    with pytest.warns(UserWarning, match=f"^PyTorch's operations.* on a GPU, since {cause}: .*{found}"):
        assert not device_self_test.may_run(GPU, torch.float32)
    assert not device_self_test.may_run(GPU, torch.float32)  # without a second warning
    gpu.returncode, gpu.stdout, gpu.error = 0, _printed(), None
    with contextlib.nullcontext() if found in UNCERTAIN else pytest.warns(UserWarning, match=found):
        assert _in_another_process() is (found in UNCERTAIN)
    assert gpu.starts == 1 + (found in UNCERTAIN)


def test_the_user_decides_and_traced_tensors_start_no_test(gpu, monkeypatch):
    with FakeTensorMode():
        assert not kernels.triton_supports(torch.empty(2, 2, device="cuda"))
    for mode in "trust", "off":
        monkeypatch.setenv(device_self_test.VARIABLE, mode)
        assert device_self_test.may_run(GPU, torch.float32) == (mode == "trust")
    assert gpu.starts == 0
    monkeypatch.setenv(device_self_test.VARIABLE, "yes")
    with pytest.raises(ValueError, match="EFFICIENT_DENSENET_TRITON is 'yes', but must be one of check, trust, off"):
        device_self_test.may_run(GPU, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_process_has_the_paths_of_this_one_says_what_it_lacks_and_is_ended(tmp_path, monkeypatch):
    """Modules in the working directory are none of its own."""
    (tmp_path / "dataclasses.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    lacking = device_self_test._test(0, torch.float32, "ieee", "relu")
    monkeypatch.setattr(device_self_test, "SECONDS", 0.1)
    slow = device_self_test._test(0, torch.float32, "ieee", "relu")
    assert not lacking.certain
    assert not slow.certain
    assert "NVIDIA" in lacking.failure or "CUDA" in lacking.failure, lacking
    assert "timed out after 0.1 seconds" in slow.failure


def _lines_of_doctor(monkeypatch, **options) -> list[str]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("triton.runtime.driver", mock.Mock())
    kernels.has_triton.cache_clear()
    return list(doctor.report(**options))


def test_the_doctor_says_what_runs_on_each_gpu(gpu, monkeypatch):
    gpu.stdout = _printed("conv3x3_forward differs by 1", seconds=())
    with pytest.warns(UserWarning, match="conv3x3_forward"):
        device_self_test.may_run(GPU, torch.bfloat16)
    lines = _lines_of_doctor(monkeypatch)
    assert "GPU 0: a GPU, compute capability 9.0" in lines
    assert "  float32, ieee: Triton, if they pass the self-test: the first step tests, as does --compare" in lines
    assert "  bfloat16: PyTorch's operations, since of the Triton kernels conv3x3_forward differs by 1" in lines
    gpu.stdout = _printed("CUDA out of memory", certain=False)
    with pytest.warns(UserWarning, match="out of memory"):
        lines = _lines_of_doctor(monkeypatch, compare=True)
    assert any("since the Triton kernels could not be tested: CUDA out of memory" in line for line in lines)
    monkeypatch.setenv(device_self_test.VARIABLE, "trust")
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
