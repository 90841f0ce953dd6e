"""The Numba kernels on bfloat16 matrices: arithmetic in float32, by each product that processors have for bfloat16."""

import functools
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from grids import grid
from helpers import kernel_modules
from kernel_operations import check_non_finite, fill_scratch_with_nan

from efficient_densenet import DenseNet, kernels
from efficient_densenet.kernels import portable
from efficient_densenet.kernels.comparison import OPERATIONS, SETTINGS, Case, is_valid
from efficient_densenet.kernels.numba_cpu.host import openmp

numba = pytest.importorskip("numba", reason="the kernels are compiled by Numba")
if not openmp.available():
    pytest.skip("this PyTorch has no GNU OpenMP threads", allow_module_level=True)
amx, operations, launch, memory, products, gemm, gemm_amx, processor = kernel_modules(
    "numba_cpu", "amx", "operations", "launch", "memory", "products", "gemm", "gemm_amx", "processor"
)
import amx_model  # noqa: E402  (it needs Numba)

TILES = [5, 256]
PRODUCTS = ["float32", "avx512_bf16", "amx"]
PRODUCT_OPERATIONS = [name for name in OPERATIONS if "conv" in name]
UNIT_ROUNDOFF = torch.finfo(torch.bfloat16).eps / 2


@pytest.fixture(params=TILES)
def tile(request, monkeypatch):
    monkeypatch.setattr(operations, "TILE", request.param)


@pytest.fixture(params=PRODUCTS)
def product(request, monkeypatch):
    """The kernels multiply by this product, in every test that requests it. Where there is no AMX, a model of its
    registers takes their place."""
    if request.param == "avx512_bf16" and not processor.has(request.param):
        pytest.skip(f"this processor has no {request.param}")
    chosen = {
        "float32": products.Product(torch.float32, gemm.gemm),
        "avx512_bf16": products.Product(torch.bfloat16, gemm.gemm_bfloat16),
        "amx": products.Product(torch.bfloat16, gemm_amx.gemm_amx),
    }[request.param]
    for module in (operations, launch):
        monkeypatch.setattr(module, "product_of", lambda dtype: chosen)
    for cached in (launch.gemm_address_for, launch.address):
        cached.cache_clear()
    threads = torch.get_num_threads()
    if request.param == "amx" and not (processor.has("amx") and products.permitted()):
        monkeypatch.setattr(launch, "gemm_address_for", lambda dtype: _amx_model().address)
        torch.set_num_threads(1)
    yield request.param
    monkeypatch.undo()
    torch.set_num_threads(threads)
    for cached in (launch.gemm_address_for, launch.address):
        cached.cache_clear()
    assert amx_model.faults() == 0


@functools.cache
def _amx_model():
    """Not by `compile_kernel`, which would keep the model's address on disk."""
    model = gemm_amx.make_gemm(amx_model.TILES)

    @numba.cfunc(numba.types.void(*[numba.types.intp] * 11, numba.types.float32))
    def product(m, n, k, a, a_row, a_column, b, b_row, accumulate, c, c_row, zero):
        model(m, n, k, a, a_row, a_column, b, b_row, accumulate != 0, c, c_row, zero)

    return product


def _check(operation: str, case: Case) -> None:
    """An element of the result is the exact one, rounded once, and with narrow operands as far from it as their
    rounding makes it. Statistics are those of the rounded elements."""
    operand = operations.product_of(torch.bfloat16).operand
    of_operands = 4 * UNIT_ROUNDOFF if operand is torch.bfloat16 and operation in PRODUCT_OPERATIONS else 0
    exact = OPERATIONS[operation](portable, case.in_float64())
    actual, expected = (OPERATIONS[operation](each, case) for each in (operations, portable))
    of_rounded = operation.endswith("with_statistics")
    assert len(actual) == len(expected) == len(exact)
    for i, (result, portable_result, reference) in enumerate(zip(actual, expected, exact, strict=True)):
        assert (result.dtype, result.shape) == (portable_result.dtype, portable_result.shape)
        largest = float(reference.abs().max()) if reference.numel() else 0
        operand_error = 1e-5 * (largest + 1) + of_operands * max(largest, 1)  # a single number may be small by chance
        if of_rounded and i:
            _check_statistics(actual[0], result, i - 1)
        else:
            rounding = UNIT_ROUNDOFF * reference.abs() if result.dtype is torch.bfloat16 else 0
            assert ((result - reference).abs() <= rounding + operand_error).all(), (operation, i)


def _check_statistics(output: torch.Tensor, result: torch.Tensor, row: int) -> None:
    """Mean, biased variance or 1 / sqrt(var + eps) of the output as it is stored."""
    mean, variance = output.double().mean(0), output.double().var(0, correction=0)
    expected = (mean, variance, (variance + 1e-3).rsqrt())[row]
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("tile", "product")
@pytest.mark.parametrize(
    *grid(
        is_valid,
        operation=[name for name in OPERATIONS if name != "affine_forward"],  # which is portable's
        shape=[(1, 1, 1), (1, 1, 7), (1, 9, 7), (2, 5, 13), (2, 4, 3, 5), (3, 9)],
        channels__width=[(2, 20), (5, 48), (5, 1), (17, 401), (300, 16)],
        setting=SETTINGS,
        tile=TILES,
        product=PRODUCTS,
    ),
    indirect=["tile", "product"],
)
def test_elements_are_exact_but_for_their_rounding(operation, shape, channels, width, setting):
    _check(operation, Case(shape, channels, width, torch.bfloat16, **SETTINGS[setting]))


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("operation", PRODUCT_OPERATIONS)
@pytest.mark.parametrize(("channels", "width"), [(9, 17), (16, 3)])
def test_nothing_is_read_from_scratch_that_was_not_written(operation, channels, width, monkeypatch):
    fill_scratch_with_nan(monkeypatch)
    _check(operation, Case((2, 5, 7), channels, width, torch.bfloat16))


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("operation", ["conv3x3_forward_with_statistics", "conv3x3_backward"])
@pytest.mark.parametrize("dilation", [2, 3])
def test_dilation(operation, dilation):
    _check(operation, Case((2, 5, 13), 9, 16, torch.bfloat16, dilation=dilation))


@pytest.mark.parametrize("operation", ["affine_backward", "conv1x1_backward", "conv3x3_forward"])
def test_parameters_of_norms_in_bfloat16(operation):
    case = Case((2, 5, 13), 9, 16, torch.bfloat16)
    case.norm_weight, case.norm_bias = case.norm_weight.bfloat16(), case.norm_bias.bfloat16()
    _check(operation, case)


@pytest.mark.parametrize(
    "operation", [name for name in OPERATIONS if name not in ("affine_forward", "batch_statistics")]
)
def test_nothing_falls_back_to_portable(operation, monkeypatch):
    """Neither under autocast nor in a model in bfloat16."""
    for name in dir(kernels.interface.Kernels):
        if not name.startswith("_"):
            monkeypatch.setattr(portable, name, None)
    case = Case((2, 4, 6), 9, 16, torch.bfloat16)
    OPERATIONS[operation](operations, case)
    case.norm_weight, case.norm_bias = case.norm_weight.bfloat16(), case.norm_bias.bfloat16()
    OPERATIONS[operation](operations, case)


@functools.cache
def _converter(source: type, destination: type):
    """`memory.convert` between two dtypes, uint16 being bfloat16's."""
    source_element, destination_element, convert = source(0), destination(0), memory.convert

    @numba.njit
    def function(source, target, count):
        convert(source, source_element, target, destination_element, count)

    return function


def test_widening_is_exact():
    bits = np.arange(1 << 16, dtype=np.uint16)
    widened = np.empty(len(bits), np.float32)
    _converter(np.uint16, np.float32)(bits.ctypes.data, widened.ctypes.data, len(bits))
    expected = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    assert np.array_equal(widened.view(np.uint32), expected.view(np.uint32))


def test_rounding_is_to_the_nearest_even_and_keeps_nan():
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    numbers = (halves[:, None] | tails).ravel().view(np.float32)
    rounded = np.empty(len(numbers), np.uint16)
    _converter(np.float32, np.uint16)(numbers.ctypes.data, rounded.ctypes.data, len(numbers))
    actual, expected = torch.from_numpy(rounded).view(torch.bfloat16), torch.from_numpy(numbers).bfloat16()
    assert torch.equal(actual.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(actual[finite].view(torch.int16), expected[finite].view(torch.int16))


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "batch_statistics"])
def test_non_finite_values_propagate_as_in_portable(operation):
    check_non_finite(operations, operation, Case((1, 8, 8), 6, 16, torch.bfloat16))


@pytest.mark.parametrize("left_out", ["", "amx,avx512_bf16"])
def test_tensors_are_not_accessed_out_of_bounds(left_out):
    """Protected pages lie beside each tensor that a kernel reads or writes, and each part of the scratch memory."""
    completed = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("guarded_memory.py"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), processor.VARIABLE: left_out},
    )
    assert completed.returncode == 0, (completed.stdout.splitlines()[-1:], completed.stderr)
    assert completed.stdout.endswith("all\n")


def _network(efficient: str | bool, seed: int, **overrides) -> DenseNet:
    torch.manual_seed(seed)
    return DenseNet(8, (2, 3), num_init_features=12, efficient=efficient, **overrides)


def _step(model: DenseNet, images: torch.Tensor, autocast: bool) -> list[torch.Tensor]:
    """The output and the gradients."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(images)
    output.to(torch.promote_types(output.dtype, torch.float32)).square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None for grad in grads)
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def _error(results: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    return statistics.median(
        float((result - exact).norm() / exact.norm())
        for result, exact in zip(results, reference, strict=True)
        if exact.any()
    )


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(
    *grid(overrides=[{}, {"small_inputs": False}, {"bn_size": 0}], autocast=[True, False], product=PRODUCTS),
    indirect=["product"],
)
def test_networks_are_as_exact_as_plain(overrides, autocast):
    """The median over networks: their output's error, and the median error of their gradients."""
    ratios = []
    for seed in range(7):
        exact, ours, plain = (_network(name, seed, **overrides) for name in (False, "shared", False))
        images = torch.randn(4, 3, 32, 32)
        if not autocast:
            images, ours, plain = images.bfloat16(), ours.bfloat16(), plain.bfloat16()
        images = images.contiguous(memory_format=torch.channels_last if seed % 2 else torch.contiguous_format)
        reference = _step(exact.double(), images.double(), False)
        results, expected = _step(ours, images, autocast), _step(plain, images, autocast)
        parts = slice(1), slice(1, None)
        ratios.append(
            [_error(results[part], reference[part]) / _error(expected[part], reference[part]) for part in parts]
        )
        for (name, buffer), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
            assert torch.allclose(buffer.float(), other.float(), rtol=0.05, atol=0.05), name
    for of_outputs_or_gradients in zip(*ratios, strict=True):
        assert statistics.median(of_outputs_or_gradients) <= 1.5
