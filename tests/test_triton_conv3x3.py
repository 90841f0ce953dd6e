"""The Triton kernels of the 3×3 convolution: on a GPU if there is one, else through Triton's interpreter."""

import functools
import importlib
import math

import pytest
import torch
from grids import pairwise
from kernel_operations import check, check_non_finite, check_variance_far_from_zero, rounded_to_tf32
from triton_interpreter import mended_interpreter  # noqa: F401

from efficient_densenet.kernels import portable
from efficient_densenet.kernels.comparison import OPERATIONS, SETTINGS, Case, is_valid
from efficient_densenet.kernels.interface import (
    AffineInput,
    BatchNormAffine,
    GradAccumulator,
    StatisticsOutput,
)

pytest.importorskip("triton", reason="needs Triton")
triton_kernels = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.operations")
conv3x3 = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.conv3x3")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONV3X3 = ["conv3x3_forward", "conv3x3_forward_with_statistics", "conv3x3_backward"]

Case = functools.partial(Case, device=DEVICE)
check = functools.partial(check, triton_kernels)


@pytest.fixture(autouse=True)
def _triton_for_exact_products_too(monkeypatch, mended_interpreter):  # noqa: F811
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(conv3x3, "MAX_EXACT_OUT_CHANNELS", 64)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched."""
    names, launch = [], conv3x3.launch.launch

    def recorded(prepared, *tensors):
        names.append(prepared.kernel.fn.__name__)
        launch(prepared, *tensors)

    monkeypatch.setattr(conv3x3.launch, "launch", recorded)
    return names


@pytest.mark.parametrize(
    *pairwise(
        is_valid,
        operation=CONV3X3,
        shape=[(1, 1, 1), (2, 1, 5), (3, 7, 3), (1, 19, 13)],
        channels__width=[(1, 1), (20, 12), (33, 20), (12, 48)],
        dilation=[1, 2, 3],
        dtype=[torch.float32, torch.bfloat16, torch.float16],
        setting=SETTINGS,
    )
)
def test_every_shape(operation, shape, channels, width, dilation, dtype, setting, launched):
    check(operation, Case(shape, channels, width, dtype, dilation=dilation, **SETTINGS[setting]))
    assert any("conv3x3" in name for name in launched)


@pytest.mark.parametrize("activation", ["relu", "elu", "hardtanh"])
@pytest.mark.parametrize("operation", CONV3X3[1:])
def test_tiles_and_splits_that_loop(operation, activation, monkeypatch):
    monkeypatch.setattr(conv3x3, "num_splits", lambda *_, **__: 2)
    check(operation, Case((2, 11, 13), 20, 12, activation=activation))


def test_splits_are_as_many_as_programs_or_tiles_allow():
    assert conv3x3.num_splits(1, 64, 3, 8) == 1
    assert conv3x3.num_splits(262144, 64, 2, 1056) == 528
    assert conv3x3.num_splits(3136, 32, 6, 264, min_tiles=8) == 13
    assert conv3x3.num_splits(3136, 32, 600, 264) == 1


@pytest.mark.parametrize("dilation", [1, 5])
def test_without_sums_that_are_shifted(dilation, monkeypatch):
    """As before Triton 3.3; and as with a dilation of which two would be too large a part of a tile."""
    if dilation == 1:
        monkeypatch.setattr(conv3x3, "HAS_GATHER", False)
    check("conv3x3_forward_with_statistics", Case((2, 9, 11), 20, 12, dilation=dilation))


def test_the_gradient_of_a_weight_in_channels_last_memory_is_contiguous():
    case = Case((2, 5, 7), 9, 16)
    case.weight3x3 = case.weight3x3.contiguous(memory_format=torch.channels_last)
    check("conv3x3_backward", case)
    grad_weight, *_ = OPERATIONS["conv3x3_backward"](triton_kernels, case)
    assert grad_weight.is_contiguous()
    case.weight3x3 = case.weight3x3.transpose(2, 3)
    check("conv3x3_backward", case)


def test_launches_of_a_convolution(launched):
    """Besides, one copy of the weight in channels_last memory for each direction."""
    OPERATIONS["conv3x3_forward_with_statistics"](triton_kernels, Case((2, 5, 7), 9, 16))
    assert launched == ["conv3x3_forward", "combine_statistics"]
    launched.clear()
    OPERATIONS["conv3x3_backward"](triton_kernels, Case((2, 5, 7), 9, 16))
    assert launched == ["conv3x3_grad_input", "conv3x3_grad_weight", "finish_backward"]
    launched.clear()
    OPERATIONS["conv3x3_backward"](triton_kernels, Case((2, 5, 7), 9, 16, needs_grad_weight=False))
    assert launched == ["conv3x3_grad_input", "finish_backward"]


@pytest.mark.parametrize("operation", CONV3X3)
def test_grids_of_many_pixels_are_within_cuda_s_limits(operation, monkeypatch):
    """Recorded on the meta device: 2³¹ − 1 program instances on the first axis, 65,535 on the others."""
    grids = []
    monkeypatch.setattr(conv3x3.launch, "launch", lambda prepared, *_: grids.append(prepared.grid))
    monkeypatch.setattr(conv3x3, "precision", lambda: "tf32")
    with torch.device("meta"):
        shape = torch.Size([8, 2048, 2048])
        values, weight = torch.empty(shape.numel(), 4), torch.empty(12, 4, 3, 3)
        norm, matrix = BatchNormAffine(*(torch.empty(4) for _ in range(4))), torch.empty(3, 12)
        assert conv3x3.is_for_triton(weight, shape)
        if operation == "conv3x3_backward":
            accumulator = GradAccumulator(torch.empty_like(values))
            conv3x3.backward(torch.empty(shape.numel(), 12), AffineInput(values, norm), weight, accumulator, shape)
        else:
            statistics = StatisticsOutput(matrix, 1e-5) if operation.endswith("statistics") else None
            conv3x3.forward(AffineInput(values, norm), weight, shape, 1, statistics)
    assert grids
    assert all(max(grid[1:], default=0) <= 65535 for grid in grids)


@pytest.mark.parametrize("operation", CONV3X3)
def test_tf32_operands_are_rounded(operation, monkeypatch):
    """The result is that of a convolution in float64 of rounded operands, but for sums in float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    case = Case((2, 7, 9), 20, 12)
    results = OPERATIONS[operation](triton_kernels, case)
    rounded = case.in_float64()
    rounded.weight3x3 = rounded_to_tf32(case.weight3x3)
    rounded.grad_output = rounded_to_tf32(case.grad_output)
    monkeypatch.setattr(portable, "_activated", functools.partial(_rounded, portable._activated))
    for result, expected in zip(results, OPERATIONS[operation](portable, rounded), strict=True):
        assert (result - expected).norm() <= 1e-5 * expected.norm()


def _rounded(activated, *arguments):
    activation, buffer = activated(*arguments)
    return rounded_to_tf32(activation.float()), buffer


@pytest.mark.parametrize("operation", CONV3X3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_non_finite_values_propagate_as_in_portable(operation, dtype, tf32, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    case = Case((1, 8, 8), 6, 16, dtype)
    case.grad_output[50, 2] = math.nan
    check_non_finite(triton_kernels, operation, case)


def test_variance_of_an_output_far_from_zero():
    check_variance_far_from_zero(triton_kernels, "conv3x3_forward_with_statistics", (5, 9, 7), DEVICE)


@pytest.mark.parametrize(
    ("width", "shape", "dtype", "allow_tf32", "dilation", "expected"),
    [
        (12, (256, 32, 32), torch.float32, True, 1, True),
        (32, (64, 56, 56), torch.float32, True, 1, True),
        (48, (64, 7, 7), torch.bfloat16, True, 1, True),
        (65, (64, 56, 56), torch.bfloat16, True, 1, False),
        (12, (256, 32, 32), torch.float32, False, 1, True),
        (32, (64, 56, 56), torch.float32, False, 1, False),
        (32, (64, 56, 56), torch.bfloat16, False, 1, True),
        (12, (2, 900), torch.float32, True, 1, False),
        (12, (2, 9, 9, 9), torch.float32, True, 1, False),
        (12, (0, 32, 32), torch.float32, True, 1, False),
        (12, (2**11, 2**10, 2**10), torch.float32, True, 1, False),
        (12, (1, 32, 2**15), torch.float32, True, 2**16, False),
    ],
)
def test_the_choice_between_triton_and_cudnn(width, shape, dtype, allow_tf32, dilation, expected, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allow_tf32)
    weight = torch.empty(width, 4 * width, *[3] * (len(shape) - 1), dtype=dtype, device="meta")
    assert conv3x3.is_for_triton(weight, torch.Size(shape), dilation) is expected
