"""The fused kernels: portable's numbers, on a GPU where there is one, and elsewhere through Triton's interpreter."""

import copy
import functools
import importlib
import math
import os
import subprocess
import sys

import pytest
import torch
from grids import grid
from helpers import assert_close, backward, picture, small_model, with_engine
from kernel_operations import OPERATIONS, Case, accumulates_or_not, check, large_enough
from torch import nn

from efficient_densenet import DenseLayer
from efficient_densenet.engines import kernels
from efficient_densenet.engines.kernels import portable

triton = pytest.importorskip("triton", reason="the fused kernels are written in Triton")
fused = importlib.import_module("efficient_densenet.engines.kernels.triton_gpu.operations")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = triton.language.bfloat16, triton.language.float32
needs_device = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def _bfloat16_in_the_interpreter(monkeypatch):
    """It keeps the upper half of a float32's bits, which it multiplies as integers and gets by cutting off the rest."""
    if DEVICE == "cuda":
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    multiply, narrow, (bfloat16, float32) = builder.create_dot, builder.create_fp_trunc, DTYPES

    def create_dot(self, first, second, *rest):
        return multiply(self, widened(first), widened(second), *rest)

    def widened(value):
        if value.dtype.scalar != bfloat16:
            return value
        return handle((value.data.astype("uint32") << 16).view("float32"), float32)

    def create_fp_trunc(self, value, dtype):
        if (value.dtype.scalar, dtype.scalar) != (float32, bfloat16):
            return narrow(self, value, dtype)
        rounded = torch.from_numpy(value.data.copy()).bfloat16().view(torch.int16).numpy().view("uint16")
        return handle(rounded, bfloat16)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "create_fp_trunc", create_fp_trunc)


Case = functools.partial(Case, device=DEVICE)
check = functools.partial(check, fused)


@pytest.mark.parametrize(
    *grid(
        large_enough,
        operation=OPERATIONS,
        shape=[(1, 1, 1), (1, 1, 7), (1, 9, 7), (2, 5, 13)],
        channels__width=[(1, 20), (5, 48), (36, 16)],
        dtype=[torch.float32, torch.bfloat16],
    )
)
def test_every_operation(operation, shape, channels, width, dtype):
    check(operation, Case(shape, channels, width, dtype))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "backward" in name])
def test_the_first_gradient_takes_the_place_of_what_was_pending(operation):
    check(operation, Case((2, 5, 7), 9, 16, overwrite=True))


@pytest.mark.parametrize(
    "operation", [name for name in OPERATIONS if name.startswith(("conv", "pooled")) and name.endswith("backward")]
)
def test_a_weight_that_does_not_learn(operation):
    case = Case((2, 5, 7), 9, 16)
    case.needs_grad_weight = False
    check(operation, case)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_programs_that_loop_and_pictures_one_at_a_time(operation, monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", 2)
    monkeypatch.setitem(portable.TILE_BYTES, "cuda", 1)
    check(operation, Case((3, 9, 15), 33, 20))


@pytest.mark.parametrize(
    *grid(
        accumulates_or_not,
        operation=[name for name in OPERATIONS if "conv3x3" in name or "pooled" in name],
        shape=[(2, 9), (2, 4, 3, 5), (2, 3, 4, 5)],
        first=[False, True],
    )
)
def test_signals_and_volumes(operation, shape, first, monkeypatch):
    monkeypatch.setitem(portable.TILE_BYTES, "cuda", 1)
    check(operation, Case(shape, 9, 16, overwrite=first))


@pytest.mark.parametrize(
    *grid(
        operation=["conv3x3_forward", "conv3x3_backward"],
        shape=[(2, 9), (2, 5, 13), (2, 4, 3, 5)],
        dilation=[2, 3],
    )
)
def test_dilation(operation, shape, dilation):
    case = Case(shape, 9, 16)
    case.dilation = dilation
    check(operation, case)


@pytest.mark.parametrize("operation", ["conv1x1_forward_with_statistics", "conv1x1_backward"])
@pytest.mark.parametrize("width", [100, 192, 260])
def test_wide_bottlenecks(operation, width):
    check(operation, Case((1, 7, 9), 40, width))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_float16(operation):
    check(operation, Case((2, 4, 6), 8, 16, torch.float16))


def test_matrices_with_rows_side_by_side():
    case = Case((1, 5, 4), 6, 16)
    case.values, case.of_values = (matrix.t().contiguous().t() for matrix in (case.values, case.of_values))
    check("batch_statistics", case)
    check("affine_backward", case)


@pytest.mark.parametrize("operation", ["batch_statistics", "conv1x1_forward_with_statistics"])
def test_variance_of_values_far_from_zero(operation):
    case = Case((5, 9, 7), 16, 16)
    case.values = 1000 + 0.01 * case.values
    case.scale, case.shift, case.squeeze = torch.ones_like(case.scale), 0 * case.shift, torch.eye(16, device=DEVICE)
    *_, variance = OPERATIONS[operation](fused, case)
    assert_close(variance, case.values.double().var(0, correction=0).float(), 1e-3 * 1e-4)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "batch_statistics"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_not_finite_values_go_where_portable_lets_them(operation):
    case = Case((1, 8, 8), 6, 16)
    case.values[3, 1], case.values[30, 4] = math.nan, math.inf
    ours, theirs = (OPERATIONS[operation](kernels, case) for kernels in (fused, portable))
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found.isfinite(), expected.isfinite())


@pytest.fixture
def _fused_everywhere(monkeypatch):
    monkeypatch.setattr(kernels, "runs_fused", lambda values: values.dtype != torch.double)


@pytest.mark.usefixtures("_fused_everywhere")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("family", "keep"), [("basic", False), ("bc", False), ("bc", True)])
def test_a_step_of_a_network_errs_at_most_twice_as_much_as_plain(family, keep, frozen):
    truth = small_model(family, efficient=False).to(DEVICE)
    for layer in (m for m in truth.modules() if isinstance(m, DenseLayer)):
        layer.keep_bottleneck = keep
    x = picture(family, batch=2).to(DEVICE)
    if frozen:
        truth(x)
        for module in truth.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    plain = copy.deepcopy(truth).float()
    ours = _everything(with_engine(plain, "shared"), x.float())
    expected, theirs = _everything(truth, x), _everything(plain, x.float())
    errors = [math.hypot(*map(_distance, found, expected)) for found in (ours, theirs)]
    assert errors[0] <= 2 * errors[1] + 2 * torch.finfo(torch.float32).eps * len(expected) ** 0.5


def _everything(model, x):
    model.zero_grad()
    output, grad = backward(model, x)
    return [output, grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def _distance(found, expected):
    return ((found - expected).double().norm() / (expected.double().norm() + 1e-3)).item()


def test_who_takes_which(monkeypatch):
    assert kernels.kernels_for(torch.randn(2, 2)) is not fused
    assert kernels.kernels_for(torch.empty(2, 2, device="meta")) is portable
    if DEVICE == "cuda":
        for dtype, expected in {torch.double: portable, torch.float32: fused, torch.bfloat16: fused}.items():
            assert kernels.kernels_for(torch.empty(2, 2, device=DEVICE, dtype=dtype)) is expected
    monkeypatch.setattr(kernels, "runs_fused", lambda values: True)
    assert kernels.kernels_for(torch.randn(2, 2)) is fused


def test_nothing_imports_triton_before_a_gpu_needs_it():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import efficient_densenet.engines.shared.stage;"
        "assert before or 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_triton_the_portable_kernels_are_used_without_a_word(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    assert not kernels._has_triton.__wrapped__(torch.device("cuda", 0))


def test_a_triton_that_cannot_run_is_told_of_once(monkeypatch):
    class Driver:
        @property
        def active(self):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("triton.runtime.driver", Driver())
    with pytest.warns(UserWarning, match="Triton cannot run here .*C compiler"):
        assert not kernels._has_triton.__wrapped__(torch.device("cuda", 0))


def test_tf32_follows_the_setting_for_convolutions(monkeypatch):
    assert fused._precision() == "ieee"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert fused._precision() == "tf32"


@needs_device
@pytest.mark.parametrize(
    "operation", ["conv1x1_forward", "conv1x1_backward", "pooled_conv1x1_forward", "pooled_conv1x1_backward"]
)
def test_tf32_errs_at_most_twice_as_much_as_pytorch_s(operation, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    check(operation, Case((4, 16, 16), 64, 48))


@needs_device
def test_a_step_can_be_captured_in_a_cuda_graph():
    plain = small_model("bc", efficient=False).float().to(DEVICE)
    model, x = with_engine(plain, "shared"), picture("bc").float().to(DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().sum().backward()
    x.copy_(torch.randn_like(x))
    graph.replay()
    plain(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, 1e-4)


FIRST_USE = """
import time, torch
from efficient_densenet import create_model
model, x = create_model("densenet_bc_100_12").cuda(), torch.randn(8, 3, 32, 32, device="cuda")
def step(engine):
    start = time.perf_counter()
    model.set_engine(engine)(x).sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start
step("plain")
print(step("shared"))
"""


@needs_device
def test_first_use_prepares_in_under_ten_seconds(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FIRST_USE]
    assert float(subprocess.run(command, env=environment, check=True, capture_output=True).stdout) < 10
