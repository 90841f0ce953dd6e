"""Affine maps on a tile of rows: a batch norm and its activation before a convolution, and a batch norm's backward."""

from ..compiler.intrinsics import compiled
from .formulas import ROW, apply_formula, normalized_row, row_buffer
from .memory import elements, pad_cells, prefetch_row, row_of, stride_of
from .threads import partition


@compiled
def affine_vectors(input, thread, threads, zero):
    """scale = γ · r and shift = β − μ · scale of a norm. Each thread has some of the channels."""
    channels, norm = input.channels, input.norm
    weight, bias = elements(norm.weight, 0, channels, zero), elements(norm.bias, 0, channels, zero)
    inv_std, mean = elements(norm.inv_std, 0, channels, zero), elements(norm.mean, 0, channels, zero)
    scale, shift = elements(input.scale, 0, channels, zero), elements(input.shift, 0, channels, zero)
    first, last = partition(channels, thread, threads)
    for j in range(first, last):
        scale[j] = weight[j] * inv_std[j]
        shift[j] = bias[j]
    if norm.mean:
        for j in range(first, last):
            shift[j] -= mean[j] * scale[j]


@compiled
def batch_norm_grad_vectors(grad, thread, threads, zero):
    """slope and constant of `batch_norm_grad_rows`: slope = −r² · mean(g · x̂), constant = −r · mean(g) − μ · slope."""
    if not grad.sums.data:
        return
    channels, sums = grad.channels, grad.sums
    inv_std, mean = elements(grad.inv_std, 0, channels, zero), elements(grad.mean, 0, channels, zero)
    grad_sum = elements(sums.data, 0, channels, zero)
    product_sum = elements(sums.data, sums.row_stride, channels, zero)
    slope, constant = elements(grad.slope, 0, channels, zero), elements(grad.constant, 0, channels, zero)
    first, last = partition(channels, thread, threads)
    for j in range(first, last):
        per_value = -inv_std[j] / grad.count
        slope[j] = product_sum[j] * inv_std[j] * per_value
        constant[j] = grad_sum[j] * per_value
    if grad.mean:
        for j in range(first, last):
            constant[j] -= mean[j] * slope[j]


@compiled
def affine_activation(input, start, stop, activation, operand, zero):
    """activation = f(scale · values + shift) of rows start to stop, (rows, channels) operands with a padded stride."""
    if input.activation.formula:
        _affine_formula(input, start, stop, activation, operand, zero)
    else:
        _affine_relu(input, start, stop, activation, operand, zero)
    channels = input.channels
    pad_cells(activation, stop - start, stride_of(channels, operand), channels, operand, zero)


@compiled
def _affine_formula(input, start, stop, activation, operand, zero):
    channels, buffer = input.channels, row_buffer(zero)
    stride = stride_of(channels, operand)
    for row in range(start, stop):
        prefetch_row(input.values, row, channels)
        for left in range(0, channels, ROW):
            width = min(ROW, channels - left)
            y = normalized_row(input, row, left, width, buffer, zero)
            apply_formula(input.activation.formula, input.activation, width, buffer, zero)
            output = elements(activation, (row - start) * stride + left, width, operand)
            for j in range(width):
                output[j] = y[j]


@compiled
def _affine_relu(input, start, stop, activation, operand, zero):
    channels = input.channels
    stride = stride_of(channels, operand)
    scale, shift = elements(input.scale, 0, channels, zero), elements(input.shift, 0, channels, zero)
    for row in range(start, stop):
        values = row_of(input.values, row, 0, channels)
        output = elements(activation, (row - start) * stride, channels, operand)
        prefetch_row(input.values, row, channels)
        for j in range(channels):
            x = values[j] * scale[j] + shift[j]
            output[j] = x if not x <= zero else zero  # NaN stays NaN


@compiled
def batch_norm_grad_rows(grad, start, stop, output, stride, element, zero):
    """grad_input = r · (g − mean(g) − x̂ · mean(g · x̂)) of rows start to stop, as slope · x + constant + r · g.

    All matrices are (rows, channels); `output` has the dtype of `element`. Without sums, grad_input = g.
    """
    channels = grad.channels
    slope, constant = elements(grad.slope, 0, channels, zero), elements(grad.constant, 0, channels, zero)
    inv_std = elements(grad.inv_std, 0, channels, zero)
    for row in range(start, stop):
        values, grad_accum = row_of(grad.values, row, 0, channels), row_of(grad.grad_accum, row, 0, channels)
        grad_input = elements(output, (row - start) * stride, channels, element)
        prefetch_row(grad.values, row, channels)
        prefetch_row(grad.grad_accum, row, channels)
        if grad.sums.data:
            for j in range(channels):
                grad_input[j] = values[j] * slope[j] + constant[j] + grad_accum[j] * inv_std[j]
        else:
            for j in range(channels):
                grad_input[j] = grad_accum[j]
