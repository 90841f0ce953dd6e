"""The fused kernels: portable's numbers, on a GPU where there is one, and elsewhere through Triton's interpreter."""

import copy
import importlib
import math
import os
import subprocess
import sys

import pytest
import torch
from helpers import assert_close, backward, picture, small_model, with_engine
from torch import nn

from efficient_densenet import DenseLayer
from efficient_densenet.engines import kernels
from efficient_densenet.engines.kernels import portable
from efficient_densenet.engines.kernels.portable import Into, Read, Settling, Squeeze

triton = pytest.importorskip("triton", reason="the fused kernels are written in Triton")
fused = importlib.import_module("efficient_densenet.engines.kernels.fused")

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


class Case:
    """What the operations take, all of it part of something wider; `truth` is the same in float64."""

    def __init__(self, shape, channels, width, dtype=torch.float32, first=False):
        self.first = first
        self.shape, self.dtype, num_rows = torch.Size(shape), dtype, math.prod(shape)
        self.values, self.pending = self._matrix(num_rows, channels), self._matrix(num_rows, channels)
        self.scale, self.shift, self.share = (torch.randn(channels, device=DEVICE) for _ in range(3))
        self.squeeze, self.pool = self._matrix(width, channels), self._matrix(channels // 2 + 1, channels)
        self.convolve = torch.randn(width, channels, *[3] * (len(shape) - 1), device=DEVICE).to(dtype)
        self.of_squeezed, self.of_values = self._matrix(num_rows, width), self._matrix(num_rows, channels)
        self.of_pooled = self._matrix(portable.halved(self.shape).numel(), len(self.pool))

    def _matrix(self, num_rows, channels):
        return torch.randn(num_rows, channels + 3, device=DEVICE).to(self.dtype)[:, :channels]

    def truth(self):
        case = copy.copy(self)
        vars(case).update({k: v.double() for k, v in vars(self).items() if isinstance(v, torch.Tensor)})
        return case

    @property
    def read(self):
        return Read(self.values, self.scale, self.shift)

    def settling(self, grad):
        """A gradient that is `grad`, and the values that it is of."""
        ones = torch.ones(grad.shape[1], device=DEVICE, dtype=self.scale.dtype)
        return Settling(Read(grad, 0.5 * ones, 0 * ones), Into(0.5 * ones, grad))

    def made(self, function):
        """What a 1×1 convolution makes, and what the function returns."""
        out = self.squeeze.new_empty(len(self.values), len(self.squeeze))
        return out, *(function(Squeeze(self.read, self.squeeze, out)) or ())

    def ahead(self, kernels, squeeze):
        into = Into(self.share, self.pending.clone())
        kernels.squeezed_gradients(self.settling(self.of_squeezed), self.read, self.squeeze, into, squeeze)

    def gradients(self, function, grad, *rest):
        """Of an operation: also what is pending, the gradient's, which lies among other channels."""
        wide = torch.zeros(len(self.pending), self.pending.shape[1] + 5, device=DEVICE, dtype=self.pending.dtype)
        pending = wide[:, : self.pending.shape[1]].copy_(self.pending)
        found = function(grad, self.read, *rest[:1], Into(self.share, pending, self.first), *rest[1:])
        assert not wide[:, self.pending.shape[1] :].any()
        return *found, pending


OPERATIONS = {
    "statistics": lambda k, c: k.statistics(c.values),
    "affine": lambda k, c: [k.affine(c.read)],
    "affine_gradients": lambda k, c: c.gradients(k.affine_gradients, c.of_values),
    "squeezed": lambda k, c: c.made(k.squeezed)[:1],
    "squeezed_and_measured": lambda k, c: c.made(k.squeezed_and_measured),
    "squeezed_gradients": lambda k, c: c.gradients(k.squeezed_gradients, c.settling(c.of_squeezed), c.squeeze),
    "squeezed_ahead": lambda k, c: c.made(lambda squeeze: c.ahead(k, squeeze))[:1],
    "convolved": lambda k, c: [k.convolved(c.read, c.convolve, c.shape)],
    "convolved_gradients": lambda k, c: c.gradients(k.convolved_gradients, c.of_squeezed, c.convolve, c.shape),
    "pooled": lambda k, c: [k.pooled(c.read, c.pool, c.shape)],
    "pooled_gradients": lambda k, c: c.gradients(k.pooled_gradients, c.of_pooled, c.pool, c.shape),
    "settled": lambda k, c: [k.settled(Settling(c.read, Into(c.share, c.pending)))],
}


def check(operation, case):
    """Errs at most twice as much as portable, both judged by float64."""
    expected = OPERATIONS[operation](portable, case.truth())
    theirs, ours = (OPERATIONS[operation](kernels, case) for kernels in (portable, fused))
    assert len(ours) == len(theirs) == len(expected)
    for i, (found, portable_s, truth) in enumerate(zip(ours, theirs, expected, strict=True)):
        assert (found.dtype, found.shape) == (portable_s.dtype, portable_s.shape)
        slack = 4 * torch.finfo(found.dtype).eps * (truth.norm() + len(case.values) ** 0.5)
        if i == 0 and operation in (
            "convolved_gradients",
            "pooled_gradients",
        ):  # of the weight, as the library rounds it
            slack += 2 * torch.finfo(case.dtype).eps * truth.norm()
        assert (found - truth).norm() <= 2 * (portable_s - truth).norm() + slack


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "width"), [(1, 20), (5, 48), (36, 16)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 7), (1, 9, 7), (2, 5, 13)])
def test_every_operation(operation, shape, channels, width, dtype):
    if "pooled" in operation and 1 in shape[1:]:
        return  # too small to pool
    check(operation, Case(shape, channels, width, dtype))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "gradients" in name])
def test_the_first_gradient_takes_the_place_of_what_was_pending(operation):
    check(operation, Case((2, 5, 7), 9, 16, first=True))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_programs_that_loop_and_pictures_one_at_a_time(operation, monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", 2)
    monkeypatch.setitem(portable.TILE_BYTES, "cuda", 1)
    check(operation, Case((3, 9, 15), 33, 20))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "convolved" in name or "pooled" in name])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shape", [(2, 9), (2, 4, 3, 5), (2, 3, 4, 5)])
def test_signals_and_volumes(operation, shape, first, monkeypatch):
    monkeypatch.setitem(portable.TILE_BYTES, "cuda", 1)
    check(operation, Case(shape, 9, 16, first=first))


@pytest.mark.parametrize("operation", ["squeezed_and_measured", "squeezed_gradients"])
@pytest.mark.parametrize("width", [100, 192, 260])
def test_wide_bottlenecks(operation, width):
    check(operation, Case((1, 7, 9), 40, width))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_float16(operation):
    check(operation, Case((2, 4, 6), 8, 16, torch.float16))


def test_matrices_with_rows_side_by_side():
    case = Case((1, 5, 4), 6, 16)
    case.values, case.of_values = (matrix.t().contiguous().t() for matrix in (case.values, case.of_values))
    check("statistics", case)
    check("affine_gradients", case)


@pytest.mark.parametrize("operation", ["statistics", "squeezed_and_measured"])
def test_variance_of_values_far_from_zero(operation):
    case = Case((5, 9, 7), 16, 16)
    case.values = 1000 + 0.01 * case.values
    case.scale, case.shift, case.squeeze = torch.ones_like(case.scale), 0 * case.shift, torch.eye(16, device=DEVICE)
    *_, variance = OPERATIONS[operation](fused, case)
    assert_close(variance, case.values.double().var(0, correction=0).float(), 1e-3 * 1e-4)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "statistics"])
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
    assert kernels.kernels_for(torch.randn(2, 2)) is portable
    assert kernels.kernels_for(torch.empty(2, 2, device="meta")) is portable
    if DEVICE == "cuda":
        for dtype, expected in {torch.double: portable, torch.float32: fused, torch.bfloat16: fused}.items():
            assert kernels.kernels_for(torch.empty(2, 2, device=DEVICE, dtype=dtype)) is expected
    monkeypatch.setattr(kernels, "runs_fused", lambda values: True)
    assert kernels.kernels_for(torch.randn(2, 2)) is fused


def test_nothing_imports_triton_before_a_gpu_needs_it():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import efficient_densenet.engines.shared;"
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
@pytest.mark.parametrize("operation", ["squeezed", "squeezed_gradients", "pooled", "pooled_gradients"])
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
