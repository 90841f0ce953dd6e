"""The portable kernels: tiles, statistics, and the 3×3 convolution of small images."""

import pytest
import torch
import torch.nn.functional as F
from checkpoint_outcomes import CountingOperations
from helpers import assert_close

from efficient_densenet.kernels import convolution, portable, row_tiles
from efficient_densenet.kernels.comparison import OPERATIONS, Case

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
        results = output, *convolution.conv3x3_gradients(grad_output, images, weight, dilation, True)
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
    assert convolution.conv3x3_gradients(grad_output, images, weight, 1, False)[1] is None


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


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("tile_bytes", [1, 600])
def test_tiles_of_few_rows_compute_what_one_tile_does(operation, tile_bytes, monkeypatch):
    case = Case((3, 4, 5), 6, 3).in_float64()
    expected = OPERATIONS[operation](portable, case)
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cpu", tile_bytes)
    for result, reference in zip(OPERATIONS[operation](portable, case), expected, strict=True):
        assert_close(result, reference)


@pytest.mark.parametrize("num_rows", [2, 37, 300])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_batch_statistics_are_accurate(num_rows, mean):
    values = torch.randn(num_rows, 9) + mean
    case = Case((1, 1, 1), 9, 2)
    result_mean, variance, inv_std = case.with_statistics(lambda s: portable.batch_statistics(values, s), 9)
    exact = values.double()
    torch.testing.assert_close(result_mean, exact.mean(0).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(variance, exact.var(0, correction=0).float(), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(inv_std, (variance + 1e-3).rsqrt())
