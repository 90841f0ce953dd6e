"""The Triton kernels agree with the portable ones: on a GPU if there is one, else through Triton's interpreter."""

import contextlib
import functools
import importlib.util
import itertools
import math

import pytest
import torch
from grids import sampled
from helpers import kernel_modules
from kernel_operations import (
    CONV3X3,
    SIZES,
    check,
    check_is_portable,
    check_non_finite,
    check_variance_far_from_zero,
    is_case,
    rounded_to_tf32,
)
from triton_interpreter import mended_interpreter  # noqa: F401 (a fixture)

from efficient_densenet import kernels
from efficient_densenet.kernels import portable, row_tiles
from efficient_densenet.kernels.activations import TABLE
from efficient_densenet.kernels.comparison import OPERATIONS, SETTINGS, Case

triton = pytest.importorskip("triton", reason="needs Triton")
triton_kernels, common, conv1x1, conv3x3, launch, tiles = kernel_modules(
    "triton_gpu", "operations", "common", "conv1x1", "conv3x3", "launch", "tiles"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("mended_interpreter")
needs_device = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

Case = functools.partial(Case, device=DEVICE)
check = functools.partial(check, triton_kernels)


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch):
    """Triton computes 3×3 convolutions in exact float32 too, however wide."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(conv3x3, "MAX_EXACT_OUT_CHANNELS", 64)


@pytest.mark.parametrize(
    *sampled(
        is_case,
        count=1500,
        operation=list(OPERATIONS),
        size=SIZES,
        dtype=DTYPES,
        setting=list(SETTINGS),
        activation=list(TABLE),
        dilation=[1, 2, 4, 5],
        padding=[3, 0],
        loops=[False, True],
        conv3x3_by=["triton", "cudnn"],
    )
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_every_operation(
    operation, size, dtype, setting, activation, dilation, padding, loops, conv3x3_by, monkeypatch
):
    """`loops`: program instances with several tiles of rows, tiles of one image."""
    if loops:
        monkeypatch.setattr(triton_kernels, "MAX_PROGRAM_INSTANCES", 2)
        monkeypatch.setattr(conv3x3, "num_splits", lambda *_, **__: 2)
        monkeypatch.setitem(row_tiles.TILE_BYTES, "cuda", 1)
    if conv3x3_by == "cudnn":
        monkeypatch.setattr(conv3x3, "MAX_OUT_CHANNELS", 0)
    options = {"activation": activation, "dilation": dilation, "padding": padding, **SETTINGS[setting]}
    check(operation, Case(*size, dtype, **options))


@pytest.mark.parametrize("operation", ["conv1x1_forward_with_statistics", "conv1x1_backward"])
def test_wide_bottlenecks(operation):
    """In two blocks of output channels, or by portable."""
    check(operation, Case((1, 3, 7), 17, 140))
    check_is_portable(triton_kernels, operation, Case((1, 3, 7), 17, 260))


@pytest.mark.parametrize(("shape", "dilation"), [((5, 9, 7), 1), ((19, 3, 2), 2), ((3, 1, 40), 1), ((2, 40, 1), 1)])
def test_incremental_indices_are_those_by_divisions(shape, dilation, monkeypatch):
    case, results = Case(shape, 20, 12, dilation=dilation), []
    for incremental in (False, True):
        tile = {**conv3x3.grad_weight_tile(12, tiles.Precision.IEEE), "BLOCK_ROWS": 16, "INCREMENTAL": incremental}
        monkeypatch.setattr(conv3x3, "grad_weight_tile", functools.partial(lambda tile, *_: tile, tile))
        results.append(conv3x3._grad_weight(case.grad_output, case.conv3x3))
    assert torch.equal(*results)


def test_pixels_in_no_pooling_window_have_no_gradient():
    check("pooled_conv1x1_backward", Case((1, 5, 7), 9, 16, overwrite=True))


def test_statistics_of_many_tiles_of_rows(monkeypatch):
    monkeypatch.setitem(triton_kernels._NARROW_TILE, "BLOCK_ROWS", 1)
    check_variance_far_from_zero(triton_kernels, "batch_statistics", (1, 10, 13), DEVICE)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.endswith("with_statistics")])
def test_variance_of_outputs_far_from_zero(operation):
    check_variance_far_from_zero(triton_kernels, operation, (5, 9, 7), DEVICE)


@pytest.mark.parametrize(
    ("operation", "activation", "dtype", "tf32"),
    [
        *((name, "relu", torch.float32, False) for name in OPERATIONS if name != "batch_statistics"),
        *((name, "elu", torch.float32, False) for name in ("conv1x1_forward", "conv1x1_backward")),
        *(("conv1x1_forward", name, torch.float32, False) for name in TABLE if name not in ("relu", "elu")),
        *((name, "relu", torch.float32, True) for name in ("conv1x1_backward", *CONV3X3)),
        ("conv3x3_backward", "relu", torch.bfloat16, False),
    ],
)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
def test_non_finite_values_propagate_as_in_portable(operation, activation, dtype, tf32, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    case = Case((1, 8, 8), 6, 16, dtype, activation=activation)
    case.grad_output[50, 2] = math.nan
    check_non_finite(triton_kernels, operation, case)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's products round differently")
@pytest.mark.parametrize(
    "operation", ["conv1x1_forward", "conv1x1_backward", "conv3x3_forward_with_statistics", "conv3x3_backward"]
)
@pytest.mark.parametrize("width", [12, 130])
def test_operands_are_rounded_to_tf32(operation, width, monkeypatch):
    """In the interpreter products are exact: the result is that of rounded operands, but for sums in float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    if width > 64 and "conv3x3" in operation:
        pytest.skip("cuDNN computes it")
    case = Case((2, 5, 7), 20, width)
    results, rounded = OPERATIONS[operation](triton_kernels, case), case.in_float64()
    for name in "weight1x1", "weight3x3", *(["grad_output"] if "conv3x3" in operation else []):
        setattr(rounded, name, rounded_to_tf32(getattr(case, name)))
    activated, grad_input = portable._activated, portable._batch_norm_grad_input_tile

    def rounded_activation(*arguments):
        return rounded_to_tf32(activated(*arguments).float())

    monkeypatch.setattr(portable, "_activated", rounded_activation)
    monkeypatch.setattr(
        portable, "_batch_norm_grad_input_tile", lambda *arguments: rounded_to_tf32(grad_input(*arguments).float())
    )
    for result, expected in zip(results, OPERATIONS[operation](portable, rounded), strict=True):
        assert (result - expected).norm() <= 1e-5 * expected.norm()


def test_tf32_follows_the_setting_for_convolutions_and_the_device(monkeypatch):
    weight = torch.empty(1, device=DEVICE)
    assert conv1x1.product_precision(weight).input_precision == "ieee"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert conv1x1.product_precision(weight).input_precision == "tf32"
    limits = tiles.WITHOUT_DEVICE._replace(has_tf32=False)
    monkeypatch.setattr(tiles, "device_limits", lambda device: limits)
    for dtype in (torch.float32, torch.float16):
        assert conv1x1.product_precision(weight.to(dtype)) is tiles.Precision.IEEE


@pytest.mark.parametrize("operation", ["affine_forward", "conv1x1_forward", "conv1x1_backward", "conv3x3_backward"])
def test_norm_parameters_in_half_precision(operation):
    case = Case((2, 5, 7), 9, 16)
    case.norm_weight, case.norm_bias = case.norm_weight.bfloat16(), case.norm_bias.half()
    check(operation, case)


def test_other_memory_formats():
    case = Case((1, 5, 4), 6, 16)
    case.values, case.grad_affine = (matrix.t().contiguous().t() for matrix in (case.values, case.grad_affine))
    check("batch_statistics", case)
    check("affine_backward", case)
    for weight in (case.weight3x3.contiguous(memory_format=torch.channels_last), case.weight3x3.transpose(2, 3)):
        case.weight3x3 = weight
        check("conv3x3_backward", case)
        grad_weight, *_ = OPERATIONS["conv3x3_backward"](triton_kernels, case)
        assert grad_weight.is_contiguous()


@pytest.mark.parametrize("operation", CONV3X3)
def test_grids_of_many_pixels_are_within_cuda_s_limits(operation, monkeypatch):
    """At most 65,535 program instances on each axis but the first."""
    grids = []
    monkeypatch.setattr(launch, "launch", lambda prepared, *_: grids.append(prepared.grid))
    case = Case((1, 2, 3), 4, 12).on("meta")
    case.shape, rows = torch.Size([8, 2048, 2048]), 8 * 2048 * 2048
    case.values, case.grad_accum = (torch.empty(rows, 4, device="meta") for _ in range(2))
    case.grad_output = torch.empty(rows, 12, device="meta")
    with contextlib.suppress(AssertionError, RuntimeError):  # of a case that reads what nobody wrote
        OPERATIONS[operation](triton_kernels, case)
    assert grids
    assert all(max(each[1:], default=0) <= 65535 for each in grids)


@pytest.mark.parametrize(
    ("width", "shape", "dtype", "allow_tf32", "dilation", "expected"),
    [
        (12, (256, 32, 32), torch.float32, True, 1, True),
        (65, (64, 56, 56), torch.bfloat16, True, 1, False),
        (12, (2, 900), torch.float32, True, 1, False),
        (12, (2, 9, 9, 9), torch.float32, True, 1, False),
        (12, (0, 32, 32), torch.float32, True, 1, False),
        (12, (2**11, 2**10, 2**10), torch.float32, True, 1, False),
        (12, (1, 2, 2**29), torch.float32, True, 4, False),
        (12, (256, 32, 32), torch.float32, True, 4, True),
        (12, (256, 32, 32), torch.float32, True, 5, False),
    ],
)
def test_the_choice_between_triton_and_cudnn(width, shape, dtype, allow_tf32, dilation, expected, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allow_tf32)
    weight = torch.empty(width, 4 * width, *[3] * (len(shape) - 1), dtype=dtype, device="meta")
    assert conv3x3.is_for_triton(weight, torch.Size(shape), dilation) is expected
    monkeypatch.setattr(tiles, "device_limits", lambda device: tiles.OF_H100._replace(has_tf32=False))
    assert conv3x3.is_for_triton(weight, torch.Size(shape), dilation) is (expected and width <= 16)
    monkeypatch.setattr(conv3x3, "HAS_GATHER", False)  # as before Triton 3.3
    assert not conv3x3.is_for_triton(weight, torch.Size(shape), dilation)


@pytest.mark.parametrize("overhead", [0.5, 3.0])
def test_no_split_of_the_rows_is_empty(overhead):
    """Its sums would be what was in memory."""
    sizes = (1, 63, 64, 65, 3136, 262144), (32, 64), (1, 3, 16, 300), (1, 4, 264)
    for num_rows, block_rows, channel_tiles, resident in itertools.product(*sizes):
        splits = tiles.row_splits(num_rows, block_rows, channel_tiles, resident, overhead)
        row_tiles = math.ceil(num_rows / block_rows)
        assert 1 <= splits <= row_tiles
        assert (splits - 1) * math.ceil(row_tiles / splits) < row_tiles


def test_kernels_for_chooses_by_device_and_dtype(monkeypatch):
    assert kernels.kernels_for(torch.randn(2, 2)) is not triton_kernels
    assert kernels.kernels_for(torch.empty(2, 2, device="meta")) is portable
    if DEVICE == "cuda":
        choices = {torch.double: portable, torch.float32: triton_kernels, torch.bfloat16: triton_kernels}
        for dtype, expected in choices.items():
            assert kernels.kernels_for(torch.empty(2, 2, device=DEVICE, dtype=dtype)) is expected
    monkeypatch.setattr(kernels, "triton_supports", lambda values: True)
    assert kernels.kernels_for(torch.randn(2, 2)) is triton_kernels


@pytest.fixture
def gpu(monkeypatch):
    """A device as where PyTorch has a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.version, "hip", None)
    return torch.device("cuda", 0)


def test_without_triton_the_portable_kernels_are_used_without_a_warning(gpu, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(kernels, "_imports_triton", kernels._imports_triton.__wrapped__)
    assert not kernels.has_triton.__wrapped__(gpu, torch.float32)


def test_a_triton_that_cannot_run_warns(gpu, monkeypatch):
    class Driver:
        @property
        def active(self):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("triton.runtime.driver", Driver())
    with pytest.warns(UserWarning, match="Triton cannot run here .*C compiler"):
        assert not kernels.has_triton.__wrapped__(gpu, torch.float32)


@needs_device
@pytest.mark.parametrize(
    "operation", ["conv1x1_forward", "conv1x1_backward", "pooled_conv1x1_forward", "pooled_conv1x1_backward"]
)
def test_the_error_in_tf32_is_at_most_twice_pytorch_s(operation, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    check(operation, Case((4, 16, 16), 64, 48))
