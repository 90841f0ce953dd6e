"""The Triton kernels agree with the portable ones: on a GPU if there is one, else through Triton's interpreter."""

import copy
import functools
import importlib
import math
import statistics
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from grids import grid, pairwise
from helpers import add_conv_biases, assert_close, backward, freeze_norms, random_images, small_model, with_engine
from kernel_operations import check, check_non_finite, check_variance_far_from_zero
from triton_interpreter import mended_interpreter  # noqa: F401 (a fixture)

from efficient_densenet import kernels
from efficient_densenet.kernels import portable, row_tiles
from efficient_densenet.kernels.activations import TABLE
from efficient_densenet.kernels.comparison import OPERATIONS, SETTINGS, Case, is_valid

triton = pytest.importorskip("triton", reason="needs Triton")
triton_kernels = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.operations")
conv1x1 = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.conv1x1")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("mended_interpreter")
needs_device = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


Case = functools.partial(Case, device=DEVICE)
check = functools.partial(check, triton_kernels)


OPERANDS = {"shape": [(1, 1, 1), (1, 1, 7), (1, 9, 7), (2, 5, 13)], "channels__width": [(1, 20), (5, 48), (36, 16)]}


@pytest.mark.parametrize(
    *pairwise(
        is_valid,
        operation=OPERATIONS,
        **OPERANDS,
        dtype=[torch.float32, torch.bfloat16, torch.float16],
        setting=SETTINGS,
    )
)
def test_every_operation(operation, shape, channels, width, dtype, setting):
    check(operation, Case(shape, channels, width, dtype, **SETTINGS[setting]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(*grid(is_valid, operation=OPERATIONS, **OPERANDS, dtype=[torch.float32, torch.bfloat16]))
def test_every_operation_on_every_size(operation, shape, channels, width, dtype):
    check(operation, Case(shape, channels, width, dtype))


@pytest.mark.parametrize(
    *grid(
        lambda operation, setting, **_: is_valid(operation, shape=(9, 9), setting=setting),
        operation=[name for name in OPERATIONS if name.startswith(("conv", "pooled"))],
        activation=[name for name in TABLE if name != "relu"],
        dtype=[torch.float32, torch.bfloat16],
        channels__width=[(9, 16), (5, 20)],  # exact 3×3 convolutions by Triton and by cuDNN
        setting=SETTINGS,
    )
)
def test_every_activation(operation, activation, dtype, channels, width, setting):
    check(operation, Case((2, 5, 13), channels, width, dtype, activation=activation, **SETTINGS[setting]))


@pytest.mark.parametrize(("channels", "in_place"), [(8, True), (6, False)])
def test_the_gradient_of_whole_sectors_is_written_in_place(channels, in_place):
    case = Case((2, 5, 7), channels, 16)
    expected = triton_kernels.batch_norm_grad_input(
        case.batch_norm_backward(case.values, case.grad_accum.clone(), channels)
    )
    grad = case.batch_norm_backward(case.values, case.grad_accum, channels)
    result = triton_kernels.batch_norm_grad_input(grad, may_overwrite=True)
    assert torch.equal(result, expected)
    assert (result.data_ptr() == case.grad_accum.data_ptr()) == in_place


@pytest.mark.parametrize("operation", ["affine_forward", "conv1x1_forward", "conv1x1_backward", "conv3x3_backward"])
def test_norm_parameters_in_half_precision(operation):
    case = Case((2, 5, 7), 9, 16)
    case.norm_weight, case.norm_bias = case.norm_weight.bfloat16(), case.norm_bias.half()
    check(operation, case)


@pytest.mark.parametrize(
    ("operation", "activation"),
    [*((name, "relu") for name in OPERATIONS), *((name, "elu") for name in OPERATIONS if name.endswith("backward"))],
)
def test_program_instances_that_loop_and_tiles_of_one_image(operation, activation, monkeypatch):
    monkeypatch.setattr(triton_kernels, "MAX_PROGRAM_INSTANCES", 2)
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cuda", 1)
    check(operation, Case((3, 9, 15), 33, 20, activation=activation))


@pytest.mark.parametrize(
    *pairwise(
        lambda operation, setting, dilation, **_: (
            is_valid(operation, setting=setting, shape=(9, 9)) and ("conv3x3" in operation or dilation == 1)
        ),
        operation=[name for name in OPERATIONS if "conv3x3" in name or "pooled" in name],
        shape=[(2, 9), (2, 5, 13), (2, 4, 3, 5), (2, 3, 4, 5)],
        setting=["usual", "overwrite"],
        dilation=[1, 2, 3],
    )
)
def test_signals_and_volumes_and_dilation(operation, shape, setting, dilation, monkeypatch):
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cuda", 1)
    check(operation, Case(shape, 9, 16, dilation=dilation, **SETTINGS[setting]))


@pytest.mark.parametrize("operation", ["conv1x1_forward_with_statistics", "conv1x1_backward"])
@pytest.mark.parametrize("width", [100, 192, 260])
def test_wide_bottlenecks(operation, width):
    check(operation, Case((1, 5, 9), 33, width))


def test_column_major_matrices():
    case = Case((1, 5, 4), 6, 16)
    case.values, case.grad_affine = (matrix.t().contiguous().t() for matrix in (case.values, case.grad_affine))
    check("batch_statistics", case)
    check("affine_backward", case)


@pytest.mark.parametrize("operation", ["batch_statistics", "conv1x1_forward_with_statistics"])
def test_variance_of_values_far_from_zero(operation):
    check_variance_far_from_zero(triton_kernels, operation, (5, 9, 7), DEVICE)


def test_statistics_of_many_tiles_of_rows():
    check("batch_statistics", Case((3, 80, 80), 5, 4))
    check_variance_far_from_zero(triton_kernels, "batch_statistics", (3, 80, 80), DEVICE)


@pytest.mark.parametrize(
    ("operation", "activation"),
    [
        *((name, "relu") for name in OPERATIONS if name != "batch_statistics"),
        *product(["conv1x1_forward", "conv1x1_backward"], [name for name in TABLE if name != "relu"]),
    ],
)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
def test_non_finite_values_propagate_as_in_portable(operation, activation):
    check_non_finite(triton_kernels, operation, Case((1, 8, 8), 6, 16, activation=activation))


@pytest.fixture
def _triton_everywhere(monkeypatch):
    monkeypatch.setattr(kernels, "triton_supports", lambda values: values.dtype != torch.double)


@pytest.mark.usefixtures("_triton_everywhere")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_weights_are_arranged_once_a_pass_and_their_gradients_are_contiguous(memory_format, monkeypatch):
    """Bit for bit what the kernels compute that arrange each weight by themselves."""
    model = small_model("bc").float().to(DEVICE, memory_format=memory_format)
    model.set_engine("shared")
    x, steps, arranged = random_images("bc", batch=2).float().to(DEVICE), [], []

    def record(weights):
        arranged.append([each.shape for each in weights])
        return originals(weights)

    originals = triton_kernels.arranged_weights
    for arrange in (record, list):
        monkeypatch.setattr(triton_kernels, "arranged_weights", arrange)
        # Not `backward()`, which copies gradients into the memory format of the parameters.
        steps.append(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
    num_blocks = sum("denseblock" in name for name, _ in model.features.named_children())
    assert len(arranged) == 2 * num_blocks
    assert all(each for each in arranged)
    for grad, other in zip(*steps, strict=True):
        assert torch.equal(grad, other)
    names = [name for name, _ in model.named_parameters()]
    assert all(grad.is_contiguous() for name, grad in zip(names, steps[0], strict=True) if "denselayer" in name)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_triton_everywhere")
@pytest.mark.parametrize(("family", "keep_bottleneck"), [("basic", False), ("bc", False), ("bc", True)])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_error_of_a_training_step_is_at_most_twice_plain_s(family, keep_bottleneck, biases, frozen):
    """The median over several networks: in a single one, rounding may switch a ReLU on or off."""
    growth_rate = {"basic": 3, "bc": 8}[family]  # gradients of 8 channels fill whole sectors: written in place
    settings = {"growth_rate": growth_rate, "keep_bottleneck": keep_bottleneck}
    ratios = []
    for seed in range(9):
        torch.manual_seed(seed)
        truth, x = small_model(family, efficient=False, **settings), random_images(family, batch=2).to(DEVICE)
        if biases:
            add_conv_biases(truth)
        if frozen:
            freeze_norms(truth)
        plain = copy.deepcopy(truth).float().to(DEVICE)
        expected = _step(truth.to(DEVICE), x)
        ours, theirs = (
            math.hypot(*map(_distance, _step(model, x.float()), expected))
            for model in (with_engine(plain, "shared"), plain)
        )
        ratios.append(ours / theirs)
    assert statistics.median(ratios) <= 2


def _step(model, x):
    """The output, all gradients and all buffers."""
    model.zero_grad()
    output, grad = backward(model, x)
    return [output, grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def _distance(found, expected):
    return ((found - expected).double().norm() / (expected.double().norm() + 1e-3)).item()


def test_kernels_for_chooses_by_device_and_dtype(monkeypatch):
    assert kernels.kernels_for(torch.randn(2, 2)) is not triton_kernels
    assert kernels.kernels_for(torch.empty(2, 2, device="meta")) is portable
    if DEVICE == "cuda":
        for dtype, expected in {
            torch.double: portable,
            torch.float32: triton_kernels,
            torch.bfloat16: triton_kernels,
        }.items():
            assert kernels.kernels_for(torch.empty(2, 2, device=DEVICE, dtype=dtype)) is expected
    monkeypatch.setattr(kernels, "triton_supports", lambda values: True)
    assert kernels.kernels_for(torch.randn(2, 2)) is triton_kernels


def test_nothing_imports_triton_before_a_gpu_needs_it():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import efficient_densenet.engine.stage.run;"
        "assert before or 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def gpu(monkeypatch):
    """As where PyTorch has a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    return torch.device("cuda", 0)


def test_without_triton_the_portable_kernels_are_used_without_a_warning(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    assert not kernels.has_triton.__wrapped__(gpu)


@pytest.mark.parametrize(
    ("capability", "version", "runs"),
    [((12, 0), "3.2.0", False), ((12, 0), "3.3.1", True), ((12, 1), "3.2.0", False), ((9, 0), "3.2.0+git", True)],
)
def test_a_triton_that_would_end_the_process_is_not_asked(capability, version, runs, gpu, monkeypatch, recwarn):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
    assert kernels.has_triton.__wrapped__(gpu) is runs
    messages = [str(each.message) for each in recwarn]
    assert len(messages) == (0 if runs else 1)
    assert all("Triton 3.2.0 does not compile for a GPU" in each for each in messages)


def test_a_triton_that_cannot_run_warns_once(gpu, monkeypatch):
    class Driver:
        @property
        def active(self):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("triton.runtime.driver", Driver())
    with pytest.warns(UserWarning, match="Triton cannot run here .*C compiler"):
        assert not kernels.has_triton.__wrapped__(gpu)


def test_tf32_follows_the_setting_for_convolutions(monkeypatch):
    weight = torch.empty(1, device=DEVICE)
    assert conv1x1.product_precision(weight).input_precision == "ieee"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert conv1x1.product_precision(weight).input_precision == "tf32"


@needs_device
@pytest.mark.parametrize(
    "operation", ["conv1x1_forward", "conv1x1_backward", "pooled_conv1x1_forward", "pooled_conv1x1_backward"]
)
def test_the_error_in_tf32_is_at_most_twice_pytorch_s(operation, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    check(operation, Case((4, 16, 16), 64, 48))


@needs_device
def test_a_step_can_be_captured_in_a_cuda_graph():
    plain = small_model("bc", efficient=False).float().to(DEVICE)
    model, x = with_engine(plain, "shared"), random_images("bc").float().to(DEVICE)
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
