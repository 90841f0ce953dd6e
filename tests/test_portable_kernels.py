"""The portable kernels: tiles, statistics, and the 3×3 convolution of small images."""

import pytest
import torch
from grids import pairwise
from helpers import assert_close

from efficient_densenet._dimensions import dimensions_of
from efficient_densenet.kernels import convolution, portable, row_tiles
from efficient_densenet.kernels.comparison import OPERATIONS, Case
from efficient_densenet.kernels.interface import BatchNormBackward, GradAccumulator

SHAPES = [
    *((2, 5, 4, 3), (3, 1, 1, 1), (1, 7, 1, 5), (4, 48, 3, 5), (2, 8, 32, 31)),
    *((2, 5, 6), (3, 7, 1), (2, 8, 999)),
    *((1, 6, 5, 4, 3), (1, 7, 5, 4, 3), (1, 6, 3, 2, 2), (2, 7, 5, 4, 3), (1, 16, 41, 32, 3)),
]
"""Images, signals and volumes, of the sizes for which convolutions are computed in different ways."""


@pytest.fixture(params=[True, False], ids=["AVX-512", "no AVX-512"])
def avx512(request, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if request.param else "AVX2")


@pytest.mark.usefixtures("avx512")
@pytest.mark.parametrize(
    *pairwise(shape=SHAPES, dtype=[torch.float32, torch.float64, torch.bfloat16], dilation=[1, 2, 3])
)
def test_convolutions_and_their_gradients_are_as_exact_as_their_dtype(shape, dtype, dilation):
    dims = len(shape) - 2
    matrices = [torch.randn(shape[0], *shape[2:], channels).to(dtype) for channels in (shape[1], 6)]
    images, grad_output = (matrix.movedim(-1, 1) for matrix in matrices)  # in channels_last
    weight = torch.randn(6, shape[1], *[3] * dims).to(dtype)
    output = convolution.conv3x3(images, weight, dilation)
    results = output, *convolution.conv3x3_gradients(grad_output, images, weight, dilation, True)
    assert convolution.conv3x3_gradients(grad_output, images, weight, dilation, False)[1] is None
    exact, double_weight = images.double().requires_grad_(), weight.double().requires_grad_()
    output = dimensions_of(images).conv(exact, double_weight, padding=dilation, dilation=dilation)
    expected = output, *torch.autograd.grad(output, (exact, double_weight), grad_output.double())
    tolerance = 20 * torch.finfo(dtype).eps * shape[1] ** 0.5
    for result, reference in zip(results, expected, strict=True):
        assert (result - reference).abs().max() <= tolerance * max(1, reference.abs().max())


@pytest.mark.usefixtures("avx512")
@pytest.mark.parametrize(("rows", "channels"), [(512, 160), (515, 160), (48, 1500), (64, 1500)])
def test_products_of_large_matrices(rows, channels):
    matrix, weight, grad_output = (torch.randn(size) for size in ((rows, channels), (64, channels), (rows, 64)))
    output = torch.empty(rows, 64 + 1)[:, :64]
    convolution.multiply(matrix, weight, output)
    results = output, *convolution.conv1x1_gradients(grad_output, matrix, weight, True)
    assert convolution.conv1x1_gradients(grad_output, matrix, weight, False)[1] is None
    exact = [tensor.double() for tensor in (matrix, weight, grad_output)]
    expected = exact[0] @ exact[1].t(), exact[2] @ exact[1], exact[2].t() @ exact[0]
    for result, reference in zip(results, expected, strict=True):
        assert (result - reference).abs().max() <= 1e-5 * reference.abs().max()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("tile_bytes", [1, 600])
def test_tiles_of_few_rows_compute_what_one_tile_does(operation, tile_bytes, monkeypatch):
    case = Case((3, 4, 5), 6, 3).in_float64()
    expected = OPERATIONS[operation](portable, case)
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cpu", tile_bytes)
    for result, reference in zip(OPERATIONS[operation](portable, case), expected, strict=True):
        assert_close(result, reference)


@pytest.mark.parametrize("num_rows", [2, 37, 3001])
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_statistics_are_accurate(num_rows, mean, dtype):
    values = (torch.randn(num_rows, 9) + mean * torch.linspace(0, 1, num_rows)[:, None]).to(dtype)
    case = Case((1, 1, 1), 9, 2)
    result_mean, variance, inv_std = case.with_statistics(lambda s: portable.batch_statistics(values, s), 9)
    exact = values.double()
    torch.testing.assert_close(result_mean, exact.mean(0).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(variance, exact.var(0, correction=0).float(), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(inv_std, (variance + 1e-3).rsqrt())


def test_the_mean_of_few_rows_errs_less_than_a_sum_of_one_row_after_another():
    values = torch.randn(512, 999) + 1
    case = Case((1, 1, 1), 999, 2)
    mean, *_ = case.with_statistics(lambda s: portable.batch_statistics(values, s), 999)
    assert (mean - values.double().mean(0)).square().mean().sqrt() <= 8e-8  # 1.6e-7 by PyTorch's batch norm


def test_the_gradient_of_a_bottleneck_of_many_rows_sums_to_zero():
    """An error of the sums that its norm subtracts is one of every row."""
    case = Case((8, 32, 32), 48, 12)
    values = case.values.double()
    mean, inv_std = values.mean(0).float(), values.var(0, correction=0).rsqrt().float()
    norm = case.conv3x3.input.norm._replace(mean=mean, inv_std=inv_std)
    conv = case.conv3x3._replace(input=case.conv3x3.input._replace(norm=norm))
    grad_accum, sums = torch.empty_like(case.values), torch.zeros_like(case.sums)
    grads = portable.conv3x3_backward(case.grad_output, conv, GradAccumulator(grad_accum, True, True, sums, True))
    grad_input = grads.norm_input
    if grad_input is None:
        backward = BatchNormBackward(case.values, grad_accum, inv_std, mean, sums, len(values))
        grad_input = portable.batch_norm_grad_input(backward)
    grad_input = grad_input.double()
    assert grad_input.sum(0).norm() <= 5e-9 * grad_input.abs().sum(0).norm()  # 1e-8 by PyTorch's batch norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)])
def test_the_backward_of_a_norm_with_one_consumer(dtype, tolerance):
    case = Case((3, 4, 5), 6, 3, dtype)
    case = case.in_float64() if dtype is torch.float64 else case
    grads = []
    for only_consumer in (False, True):
        accumulator = GradAccumulator(torch.empty_like(case.values), True, True, torch.zeros_like(case.sums))
        accumulator = accumulator._replace(only_consumer=only_consumer)
        grads.append(portable.conv3x3_backward(case.grad_output, case.conv3x3, accumulator))
        if not only_consumer:
            backward = case.values, accumulator.grad_accum, case.inv_std, case.mean, accumulator.sums, len(case.values)
            expected = portable.batch_norm_grad_input(BatchNormBackward(*backward))
    assert grads[0].norm_input is None
    for result, reference in zip(grads[1], (*grads[0][:3], expected), strict=True):
        assert result.dtype is reference.dtype
        assert (result - reference).abs().max() <= tolerance * reference.abs().max()
