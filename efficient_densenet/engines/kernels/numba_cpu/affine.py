"""Affine maps on a tile of rows: a batch norm and its ReLU before a convolution, and a batch norm's backward."""

from .intrinsics import compiled
from .memory import elements, prefetch_row, stride_of


@compiled
def affine_relu(input, start, stop, activation, zero):
    """activation = relu(scale · values + shift) of rows start to stop, (rows, channels) with a padded stride."""
    channels = input.channels
    stride = stride_of(channels, zero)
    scale, shift = elements(input.scale, 0, channels, zero), elements(input.shift, 0, channels, zero)
    for row in range(start, stop):
        values = elements(input.values.data, row * input.values.row_stride, channels, zero)
        output = elements(activation, (row - start) * stride, channels, zero)
        prefetch_row(input.values, row, channels, zero)
        for j in range(channels):
            x = values[j] * scale[j] + shift[j]
            output[j] = x if not x <= zero else zero  # NaN stays NaN


@compiled
def batch_norm_grad_rows(grad, start, stop, output, stride, zero):
    """dx = r · (g − mean(g) − x̂ · mean(g · x̂)) of rows start to stop, as slope · x + constant + grad_scale · g.

    The host has collected the terms in x and the constant ones in slope and constant. All are (rows, channels).
    """
    channels = grad.channels
    slope, constant = elements(grad.slope, 0, channels, zero), elements(grad.constant, 0, channels, zero)
    grad_scale = elements(grad.grad_scale, 0, channels, zero)
    for row in range(start, stop):
        values = elements(grad.values.data, row * grad.values.row_stride, channels, zero)
        grad_accum = elements(grad.grad_accum.data, row * grad.grad_accum.row_stride, channels, zero)
        grad_input = elements(output, (row - start) * stride, channels, zero)
        prefetch_row(grad.values, row, channels, zero)
        prefetch_row(grad.grad_accum, row, channels, zero)
        for j in range(channels):
            grad_input[j] = values[j] * slope[j] + constant[j] + grad_accum[j] * grad_scale[j]
