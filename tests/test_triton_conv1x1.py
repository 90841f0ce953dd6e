"""The Triton 1×1 convolutions in TF32, by rounding as in the kernels, and in slices of their output channels."""

import math

import pytest
import torch
from grids import pairwise
from helpers import kernel_modules
from kernel_operations import check, rounded_to_tf32

from efficient_densenet.kernels import portable
from efficient_densenet.kernels.comparison import OPERATIONS, Case

triton = pytest.importorskip("triton", reason="needs Triton")
tl = triton.language
operations, operands, tiles = kernel_modules("triton_gpu", "operations", "operands", "tiles")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONVOLUTIONS = ["conv1x1_forward", "conv1x1_backward"]


@triton.jit
def round_kernel(output, values, SIZE: tl.constexpr):  # noqa: N803
    i = tl.arange(0, SIZE)
    tl.store(output + i, operands.round_to_tf32(tl.load(values + i)))


def test_rounding_to_the_nearest():
    ties = torch.tensor([1 + 2**-11, -1 - 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 - 2**-23, 2 - 2**-12, 0.0, 2.0**-120])
    values = torch.cat([ties, torch.randn(1024 - len(ties)) * 100]).to(DEVICE)
    output = torch.empty_like(values)
    round_kernel[(1,)](output, values, SIZE=len(values))
    assert torch.equal(output.cpu(), rounded_to_tf32(values.cpu()).float())
    assert (output.view(torch.int32) & 0x1FFF == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4028234e38])
def test_rounding_of_what_has_no_nearest(value):
    values, output = torch.tensor([value, -value], device=DEVICE), torch.empty(2, device=DEVICE)
    values.view(torch.int32)[:1] |= 0x1FFF if math.isnan(value) else 0  # NaN as the GPU makes it
    round_kernel[(1,)](output, values, SIZE=2)
    expected = values if not math.isfinite(value) else values.sign() * math.inf
    assert torch.equal(output.isnan(), expected.isnan())
    assert torch.equal(output.nan_to_num(), expected.nan_to_num())


def rounded_products(case, operation):
    """The result in float64, but for the operands of the products, which are rounded from float32 to TF32."""
    weight = rounded_to_tf32(case.weight1x1)
    input, grad = case.input, case.grad_bottleneck(case.grad_output)
    activation = torch.relu(input.values * input.norm.scale + input.norm.shift)
    y = rounded_to_tf32(activation)
    if operation == "conv1x1_forward":
        return [y @ weight.t()]
    slope, constant, inv_std = grad.coefficients()
    grad_output = rounded_to_tf32(grad.values * slope + constant + grad.grad_accum * inv_std)
    grad_input = torch.where(activation <= 0, 0.0, grad_output @ weight)
    grad_accum = case.norm().grad_scale * grad_input + (0 if case.overwrite else case.grad_accum)
    return [grad_output.t() @ y, grad_accum]


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's products round differently: tests/test_triton_kernels.py")
@pytest.mark.parametrize(
    *pairwise(operation=CONVOLUTIONS, channels__width=[(5, 1), (36, 48), (70, 128), (20, 260)], centered=[False, True])
)
def test_operands_are_rounded_to_tf32(operation, channels, width, centered, monkeypatch):
    """In the interpreter products are exact, so that only the rounding is seen. Without it, or with another, the result
    would be as far from the expected one as TF32 is from float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    case = Case((3, 5, 7), channels, width, centered=centered)
    exact = OPERATIONS[operation](portable, case.in_float64())
    result = OPERATIONS[operation](operations, case)
    expected = rounded_products(case, operation)
    for i, of_rounded in zip([0, -1], expected, strict=False):
        assert (result[i] - of_rounded).norm() <= 0.1 * (of_rounded - exact[i]).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("overwrite", "activation"), [(False, "relu"), (True, "relu"), (True, "elu")])
def test_slices_of_the_output_channels(dtype, overwrite, activation, monkeypatch):
    """Three slices of 16, 16 and 13, rather than of hundreds."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(tiles, "MAX_OUT_CHANNELS", 16)
    case = Case((2, 5, 7), 9, 45, dtype, overwrite, DEVICE, activation=activation)
    for operation in [*CONVOLUTIONS, "conv1x1_forward_with_statistics"]:
        if operation != "conv1x1_backward" or dtype == torch.float32:
            check(operations, operation, case)


def test_devices_without_tf32_multiply_exactly(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    limits = tiles.WITHOUT_DEVICE._replace(has_tf32=False)
    monkeypatch.setattr(tiles, "device_limits", lambda device: limits)
    check(operations, "conv1x1_backward", Case((2, 5, 7), 9, 20, device=DEVICE))
