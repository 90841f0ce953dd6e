"""The portable kernels: tiles, statistics, and the 3×3 convolution of small images."""

import pytest
import torch
from checkpoint_outcomes import CountingOperations
from helpers import assert_close
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from efficient_densenet._dimensions import dimensions_of
from efficient_densenet.kernels import convolution, portable, row_tiles
from efficient_densenet.kernels.comparison import OPERATIONS, Case
from efficient_densenet.kernels.interface import BatchNormBackward, GradAccumulator

IM2COL = torch.ops.aten._slow_conv2d_forward.default, torch.ops.aten._slow_conv2d_backward.output_mask


def images_and_weight(shape, width, dtype=torch.float32):
    """Images in channels_last, a weight and the gradient of their convolution's output."""
    dims = len(shape) - 2
    matrices = [torch.randn(shape[0], *shape[2:], channels, dtype=dtype) for channels in (shape[1], width)]
    images, grad_output = (matrix.movedim(-1, 1) for matrix in matrices)
    return images, torch.randn(width, shape[1], *[3] * dims, dtype=dtype), grad_output


@pytest.mark.parametrize(
    ("shape", "dtype", "dilation", "by_im2col"),
    [
        *(
            (shape, torch.float32, 1, True)
            for shape in [(2, 5, 4, 3), (3, 1, 1, 1), (1, 7, 1, 5), (4, 48, 3, 5), (2, 5, 6)]
        ),
        ((2, 8, 32, 32), torch.float32, 1, False),  # large
        ((2, 8, 999), torch.float32, 1, False),
        *(((2, 5, 4, 3), dtype, 1, False) for dtype in (torch.float64, torch.bfloat16)),
        *((shape, torch.float32, 2, False) for shape in [(2, 5, 4, 3), (2, 5, 6), (2, 5, 4, 3, 2)]),
    ],
)
def test_small_images_are_convolved_by_im2col(shape, dtype, dilation, by_im2col):
    images, weight, grad_output = images_and_weight(shape, 6, dtype)
    with CountingOperations() as counted:
        results = convolved(images, weight, grad_output, dilation)
    assert [counted.counts[operation] for operation in IM2COL] == [by_im2col, 2 * by_im2col]
    if by_im2col and len(shape) == 4:
        assert results[1].is_contiguous(memory_format=torch.channels_last)


def pretend_avx512(monkeypatch, available):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if available else "AVX2")


@pytest.mark.parametrize(
    ("shape", "dilation", "dtype", "by_product"),
    [
        *((shape, 1, torch.float32, True) for shape in [(2, 8, 999), (2, 8, 32, 31), (2, 5, 6, 4, 3), (1, 6, 3, 2, 2)]),
        *((shape, 3, torch.float32, True) for shape in [(3, 7, 1), (2, 5, 6, 2), (2, 5, 4, 3, 2)]),
        *((shape, 1, torch.float64, False) for shape in [(2, 8, 999), (2, 5, 4, 3)]),
        ((2, 5, 4, 3), 1, torch.float32, False),  # by im2col
    ],
)
def test_gradients_are_products_without_avx512(shape, dilation, dtype, by_product, monkeypatch):
    pretend_avx512(monkeypatch, False)
    images, weight, grad_output = images_and_weight(shape, 6, dtype)
    with CountingOperations() as counted:
        _, grad_input, _ = convolved(images, weight, grad_output, dilation)
    assert counted.counts[torch.ops.aten.mm.default] == 3 * by_product
    assert grad_input.stride(1) == 1 or not by_product
    columns_bytes = grad_output.numel() * weight[0, 0].numel() * 4
    for limit, takes_it in ((columns_bytes, by_product), (columns_bytes - 1, False)):
        monkeypatch.setattr(convolution, "COLUMNS_BYTES", limit)
        with CountingOperations() as counted:
            convolution.conv3x3_gradients(grad_output, images, weight, dilation, True)
        assert (torch.ops.aten.mm.default in counted.counts) == takes_it


@pytest.mark.parametrize(
    ("shape", "dilation", "by_onednn"),
    [
        *(((1, channels, 5, 4, 3), dilation, channels % 2 == 0) for channels in (6, 7) for dilation in (1, 2)),
        ((1, 16, 40, 32, 3), 1, True),
        ((1, 16, 41, 32, 3), 1, True),  # by PyTorch
        ((2, 7, 5, 4, 3), 1, True),  # by PyTorch
    ],
)
def test_a_small_volume_is_convolved_by_onednn(shape, dilation, by_onednn, monkeypatch):
    pretend_avx512(monkeypatch, True)  # without it the gradients are products
    images, weight, grad_output = images_and_weight(shape, 6)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        output, *_ = convolved(images, weight, grad_output, dilation)
    if torch.backends.mkldnn.is_available():
        assert ("aten::mkldnn_convolution" in {event.key for event in profiled.key_averages()}) == by_onednn
    is_smaller = images.numel() < weight.numel()
    assert output.is_contiguous(memory_format=torch.channels_last_3d) != (is_smaller or not by_onednn)


def convolved(images: Tensor, weight: Tensor, grad_output: Tensor, dilation: int) -> tuple[Tensor, ...]:
    """The output and the gradients, which are as exact as their dtype."""
    output = convolution.conv3x3(images, weight, dilation)
    results = output, *convolution.conv3x3_gradients(grad_output, images, weight, dilation, True)
    assert convolution.conv3x3_gradients(grad_output, images, weight, dilation, False)[1] is None
    exact, double_weight = images.double().requires_grad_(), weight.double().requires_grad_()
    output = dimensions_of(images).conv(exact, double_weight, padding=dilation, dilation=dilation)
    expected = output, *torch.autograd.grad(output, (exact, double_weight), grad_output.double())
    tolerance = 20 * torch.finfo(images.dtype).eps * images.shape[1] ** 0.5
    for result, reference in zip(results, expected, strict=True):
        assert (result - reference).abs().max() <= tolerance * max(1, reference.abs().max())
    return results


@pytest.mark.parametrize(
    ("rows", "channels", "by_onednn"), [(512, 160, True), (515, 160, False), (48, 1500, False), (64, 1500, True)]
)
@pytest.mark.parametrize("avx512", [True, False])
def test_products_of_large_matrices(rows, channels, by_onednn, avx512, monkeypatch):
    pretend_avx512(monkeypatch, avx512)
    matrix, weight, grad_output = (torch.randn(size) for size in ((rows, channels), (64, channels), (rows, 64)))
    output = torch.empty(rows, 64 + 1)[:, :64]
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        convolution.multiply(matrix, weight, output)
    if torch.backends.mkldnn.is_available():
        assert ("aten::mkldnn_convolution" in {event.key for event in profiled.key_averages()}) == (
            by_onednn and avx512
        )
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
