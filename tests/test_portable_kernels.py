"""The portable kernels' faster operations for small inputs: where they are chosen, and that they compute the same."""

import pytest
import torch
import torch.nn.functional as F
from checkpoint_outcomes import CountingOperations
from helpers import use_kernels
from kernel_operations import Case

from efficient_densenet import DenseBlock, kernels
from efficient_densenet.engine.stage import backward
from efficient_densenet.kernels import batch_norm, convolution, portable, row_tiles
from efficient_densenet.kernels.interface import (
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    Conv1x1,
    GradAccumulator,
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


@pytest.mark.parametrize("num_rows", [1, 2, 37, batch_norm.FEW_ROWS, batch_norm.FEW_ROWS + 1])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_batch_statistics_are_accurate(num_rows, mean):
    """Few values take one pass of PyTorch's batch norm; more have partial sums."""
    values = torch.randn(num_rows, 9) + mean
    case = Case((1, 1, 1), 9, 2)
    with CountingOperations() as counted:
        result_mean, variance, inv_std = case.with_statistics(lambda s: portable.batch_statistics(values, s), 9)
    one_call = counted.counts[torch.ops.aten.native_batch_norm.out]
    assert one_call == (1 < num_rows <= batch_norm.FEW_ROWS)
    exact = values.double()
    torch.testing.assert_close(result_mean, exact.mean(0).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(variance, exact.var(0, correction=0).float(), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(inv_std, (variance + 1e-3).rsqrt())


def applied_bottleneck(case, with_norm):
    """The norm of a bottleneck's output and its statistics; its activation, where the kernel has kept that."""
    matrix = torch.zeros(3, 3, dtype=case.values.dtype)
    norm = BatchNormAffine(case.norm_weight[:3], case.norm_bias[:3], matrix[2], matrix[0])
    statistics = StatisticsOutput(matrix, 1e-3)
    statistics.norm = norm if with_norm else None
    output = case.values.new_empty(len(case.values), 3)
    portable.conv1x1_forward_with_statistics(Conv1x1(case.input, case.weight1x1, output), statistics)
    return norm, matrix, norm.take_activation(), output


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 1, 2), (4, 8, 8)])
def test_a_small_bottleneck_s_norm_is_applied_by_the_call_that_computes_its_statistics(shape, dtype, tolerance):
    case = Case(shape, 6, 3)
    exact = case.in_float64()
    case = exact if dtype is torch.float64 else case
    norm, matrix, activation, output = applied_bottleneck(case, True)
    reference, expected, not_kept, exact_output = applied_bottleneck(exact, False)
    assert not_kept is None
    assert norm.take_activation() is None
    tolerances = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(matrix, expected, **tolerances)
    torch.testing.assert_close(output, exact_output, **tolerances)
    exact_activation = torch.addcmul(reference.shift, exact_output, reference.scale).relu()
    torch.testing.assert_close(activation, exact_activation, **tolerances)


def test_a_larger_bottleneck_s_norm_is_not():
    assert applied_bottleneck(Case((1, 1, batch_norm.FEW_ROWS + 1), 6, 3), True)[2] is None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_sums_of_few_rows_are_computed_with_the_gradient(dtype, tolerance):
    exact = Case((2, 4, 5), 6, 3, centered=True).in_float64()
    exact.values, inv_std = exact.values - exact.values.mean(0), torch.rand(6).double() + 0.5
    sums = torch.stack([exact.grad_accum.sum(0), (exact.grad_accum * exact.values * inv_std).sum(0)])
    expected = BatchNormBackward(exact.values, exact.grad_accum, inv_std, None, sums, len(exact.values))
    matrices = [torch.cat([matrix, matrix], 1).to(dtype)[:, :6] for matrix in (exact.values, exact.grad_accum)]
    backward = BatchNormBackward(*matrices, inv_std.to(dtype), torch.zeros(6, dtype=dtype))
    result = portable.batch_norm_grad_input(backward)
    assert result.is_contiguous()
    assert result.dtype is dtype
    reference = portable.batch_norm_grad_input(expected)
    torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance, check_dtype=False)


def test_where_the_sums_are_computed_in_the_end(monkeypatch):
    few, many = torch.empty(batch_norm.FEW_ROWS, 4), torch.empty(batch_norm.FEW_ROWS + 1, 4)
    use_kernels(monkeypatch, "portable", 1 << 22)
    assert kernels.add_up_when_done(few)
    assert not kernels.add_up_when_done(many)
    assert not kernels.add_up_when_done(few.bfloat16())
    assert not kernels.add_up_when_done(torch.empty(few.shape, device="meta"))
    monkeypatch.setattr(kernels, "kernels_for", lambda values: None)
    assert not kernels.add_up_when_done(few)


def bottleneck_gradients(case, is_complete, **changes):
    """All gradients of a bottleneck's norm and of the convolution behind it; whether one operation computed them."""
    norm, values = case.norm(), changes.get("values", case.values)
    sums, grad_accum = torch.zeros_like(case.sums), torch.full_like(values, torch.nan)
    accumulator = GradAccumulator(norm, False, grad_accum, True, True, sums, is_complete)
    arguments = case.grad_output, AffineInput(values, norm), case.weight3x3, accumulator, case.shape, 1
    grad_weight = portable.conv3x3_backward(*arguments)
    grad_input = norm.take_grad_input()
    completed = grad_input is not None
    assert norm.grad_input is None
    if grad_input is None:
        backward = BatchNormBackward(values, grad_accum, norm.inv_std, norm.mean, sums, len(values))
        grad_input = portable.batch_norm_grad_input(backward)
    return (grad_weight, *norm.take_gradients(), grad_input), completed


def contiguous_case(shape, channels):
    """In float64, with the statistics of its own values."""
    case = Case(shape, channels, 3).in_float64()
    case.values = case.values.contiguous()
    case.mean, case.inv_std = case.values.mean(0), (case.values.var(0, correction=0) + 1e-3).rsqrt()
    return case


@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 1, 2), (3, 7, 7)])
def test_the_backward_of_a_small_bottleneck_s_norm_is_one_operation(shape):
    case = contiguous_case(shape, 6)
    results, completed = bottleneck_gradients(case, True)
    expected, in_one_pass = bottleneck_gradients(case, False)
    assert (completed, in_one_pass) == (True, False)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-10, atol=1e-10)


def test_the_backward_of_another_bottleneck_s_norm_is_not(monkeypatch):
    case = contiguous_case((2, 5, 4), 6)
    strided = torch.cat([case.values, case.values], 1)[:, :6]
    many_rows = contiguous_case((1, 17, 16), 2)
    assert not bottleneck_gradients(case, True, values=strided)[1]
    assert not bottleneck_gradients(many_rows, True)[1]
    expected, completed = bottleneck_gradients(case, True)
    assert completed
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cpu", 20 * 6 * 8)  # an image is a tile, which is small
    monkeypatch.setattr(row_tiles, "SMALL_TILE", 1)
    results, completed = bottleneck_gradients(case, True)
    assert not completed
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ["batch statistics", "frozen", "synchronized"])
def test_which_norms_have_a_complete_backward(case, monkeypatch):
    """A bottleneck's, unless it is frozen or other processes have a part in its sums; the features' then need sums."""
    use_kernels(monkeypatch, "portable", 1 << 22)
    created = []

    def accumulator(*arguments):
        created.append(GradAccumulator(*arguments))
        return created[-1]

    monkeypatch.setattr(backward, "GradAccumulator", accumulator)
    if case == "synchronized":
        statistics = backward.BackwardStatistics
        monkeypatch.setattr(statistics, "sync_group", _OneProcess(), raising=False)
        monkeypatch.setattr(statistics, "__setattr__", _keep_sync_group)
    block = DenseBlock(2, 3, 4, efficient="shared")
    if case == "frozen":
        block.eval()
    block(torch.randn(2, 3, 4, 4, requires_grad=True)).sum().backward()
    of_bottlenecks = [each.is_complete for each in created if each.overwrite]
    assert of_bottlenecks == [case == "batch statistics"] * 2
    of_features = [each for each in created if not each.overwrite]
    assert not any(each.is_complete for each in of_features)
    assert [each.sums is not None for each in of_features] == [case == "synchronized"] * 2


class _OneProcess:
    """A sync group of this process alone."""

    def sums(self, *local):
        return local


def _keep_sync_group(statistics, name, value):
    if name != "sync_group":
        object.__setattr__(statistics, name, value)
