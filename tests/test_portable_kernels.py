"""The portable kernels' faster operations for few rows or pixels: where they are chosen, and what they compute."""

import pytest
import torch
import torch.nn.functional as F
from checkpoint_outcomes import CountingOperations
from helpers import assert_close, use_kernels
from kernel_operations import check, check_is_portable

from efficient_densenet import kernels
from efficient_densenet.kernels import convolution, few_rows, portable, row_tiles
from efficient_densenet.kernels.activations import RELU_SPEC
from efficient_densenet.kernels.comparison import OPERATIONS, Case
from efficient_densenet.kernels.interface import (
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    Conv1x1,
    StatisticsOutput,
)

IM2COL = torch.ops.aten._slow_conv2d_forward.default, torch.ops.aten._slow_conv2d_backward.output_mask


def images_and_weight(shape, width, dtype=torch.float32):
    """Images in channels_last, a weight and the gradient of their convolution's output."""
    dims = len(shape) - 2
    matrices = [torch.randn(shape[0], *shape[2:], channels, dtype=dtype) for channels in (shape[1], width)]
    images, grad_output = (matrix.movedim(-1, 1) for matrix in matrices)
    return images, torch.randn(width, shape[1], *[3] * dims, dtype=dtype), grad_output


def convolve(images, weight, grad_output, dilation=1):
    """The output, grad_input and grad_weight, and what has been called for them."""
    with CountingOperations() as counted:
        output = convolution.conv3x3(images, weight, dilation)
        results = output, *convolution.conv3x3_backward(grad_output, images, weight, dilation, True)
    return results, counted.counts


@pytest.mark.parametrize("shape", [(2, 5, 4, 3), (3, 1, 1, 1), (1, 7, 1, 5), (4, 48, 3, 5)])
def test_small_images_are_convolved_by_im2col(shape):
    images, weight, grad_output = images_and_weight(shape, 6)
    results, counts = convolve(images, weight, grad_output)
    assert all(counts[operation] == 1 for operation in IM2COL)
    exact, double_weight = images.double().requires_grad_(), weight.double().requires_grad_()
    output = F.conv2d(exact, double_weight, padding=1)
    expected = output, *torch.autograd.grad(output, (exact, double_weight), grad_output.double())
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference.float(), rtol=1e-5, atol=1e-5)
        assert result.shape == reference.shape
    assert results[1].is_contiguous(memory_format=torch.channels_last)
    assert convolution.conv3x3_backward(grad_output, images, weight, 1, False)[1] is None


@pytest.mark.parametrize(
    ("shape", "dtype", "dilation"),
    [
        ((2, 8, 32, 32), torch.float32, 1),  # large
        ((2, 5, 4, 3), torch.float64, 1),
        ((2, 5, 4, 3), torch.bfloat16, 1),
        ((2, 5, 4, 3), torch.float32, 2),
        ((2, 5, 6), torch.float32, 1),
        ((2, 5, 4, 3, 2), torch.float32, 1),
    ],
)
def test_other_images_are_not(shape, dtype, dilation):
    _, counts = convolve(*images_and_weight(shape, 6, dtype), dilation)
    assert not any(counts[operation] for operation in IM2COL)
    assert counts[torch.ops.aten.convolution_backward.default] == 1


@pytest.fixture
def only_portable(monkeypatch):
    use_kernels(monkeypatch, "portable", 1 << 22)


@pytest.mark.usefixtures("only_portable")
def test_where_kernels_for_few_rows_are_chosen():
    few, many = torch.empty(few_rows.MAX_ROWS, 4), torch.empty(few_rows.MAX_ROWS + 1, 4)
    assert kernels.kernels_for(few) is kernels.kernels_for(few.double()) is few_rows
    others = [many, few[:1], few.bfloat16(), torch.empty(few.shape, device="meta")]
    assert all(kernels.kernels_for(values) is portable for values in others)
    assert kernels.kernels_for(few, synchronized=True) is portable


@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 2, 3), (4, 8, 8)])
@pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - {"batch_norm_grad_input"}))
def test_few_rows_are_computed_as_many_are(operation, shape):
    check(few_rows, operation, Case(shape, 6, 3))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("tile_bytes", [1, 600])
def test_tiles_of_few_rows_compute_what_one_tile_does(operation, tile_bytes, monkeypatch):
    case = Case((3, 4, 5), 6, 3).in_float64()
    expected = OPERATIONS[operation](portable, case)
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cpu", tile_bytes)
    for result, reference in zip(OPERATIONS[operation](portable, case), expected, strict=True):
        assert_close(result, reference)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.startswith("conv")])
def test_mixed_precision_is_computed_as_for_many_rows(operation):
    """Features in float32 whose convolutions are in bfloat16."""
    case = Case((1, 8, 8), 6, 16, torch.bfloat16)
    case.values, case.grad_accum = case.values.float(), case.grad_accum.float()
    check_is_portable(few_rows, operation, case)


@pytest.mark.parametrize("num_rows", [2, 37, few_rows.MAX_ROWS])
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("kernel_set", [few_rows, portable])
def test_batch_statistics_are_accurate(num_rows, mean, kernel_set):
    """Few values take one pass of PyTorch's batch norm; more have partial sums."""
    values = torch.randn(num_rows, 9) + mean
    case = Case((1, 1, 1), 9, 2)
    with CountingOperations() as counted:
        result_mean, variance, inv_std = case.with_statistics(lambda s: kernel_set.batch_statistics(values, s), 9)
    assert counted.counts[torch.ops.aten.native_batch_norm.out] == (kernel_set is few_rows)
    exact = values.double()
    torch.testing.assert_close(result_mean, exact.mean(0).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(variance, exact.var(0, correction=0).float(), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(inv_std, (variance + 1e-3).rsqrt())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 1, 2), (4, 8, 8)])
def test_a_bottleneck_s_norm_is_applied_by_the_call_that_computes_its_statistics(shape, dtype, tolerance):
    case = Case(shape, 6, 3)
    case = case.in_float64() if dtype is torch.float64 else case
    matrix = torch.zeros(3, 3, dtype=dtype)
    norm = BatchNormAffine(case.norm_weight[:3], case.norm_bias[:3], matrix[2], matrix[0])
    conv = Conv1x1(case.input, case.weight1x1, case.values.new_empty(len(case.values), 3))
    input = few_rows.conv1x1_forward_with_statistics(conv, StatisticsOutput(matrix, 1e-3), norm, RELU_SPEC)
    assert input[:2] == (conv.output, norm)
    exact = torch.addcmul(norm.shift.double(), conv.output.double(), norm.scale.double()).relu()
    torch.testing.assert_close(input.output, exact, rtol=tolerance, atol=tolerance, check_dtype=False)
    weight = case.weight3x3[:, :3]
    results = [few_rows.conv3x3_forward(each, weight, case.shape) for each in (input, AffineInput(*input[:2]))]
    torch.testing.assert_close(*results, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_sums_of_few_rows_are_computed_with_the_gradient(dtype, tolerance):
    exact = Case((2, 4, 5), 6, 3, centered=True).in_float64()
    exact.values, inv_std = exact.values - exact.values.mean(0), torch.rand(6).double() + 0.5
    sums = torch.stack([exact.grad_accum.sum(0), (exact.grad_accum * exact.values * inv_std).sum(0)])
    expected = BatchNormBackward(exact.values, exact.grad_accum, inv_std, None, sums, len(exact.values))
    matrices = [torch.cat([matrix, matrix], 1).to(dtype)[:, :6] for matrix in (exact.values, exact.grad_accum)]
    result = few_rows.batch_norm_grad_input(BatchNormBackward(*matrices, inv_std.to(dtype)))
    assert result.is_contiguous()
    assert result.dtype is dtype
    reference = portable.batch_norm_grad_input(expected)
    torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance, check_dtype=False)
