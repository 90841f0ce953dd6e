"""Average pooling of 2×2 pixels (2 or 2×2×2 in other dimensions) on a tile of output rows."""

from ..compiler.intrinsics import compiled
from .formulas import ROW, apply_formula, normalized_row, row_buffer
from .memory import convert, elements, is_narrow, offset, pad_cells, row_of, stride_of


@compiled
def first_pixel(row, images):
    """The row of the input with the first pixel of an output row's window."""
    width, height = images.width // 2, images.height // 2 if images.has_height else images.height
    depth = images.depth // 2 if images.has_depth else images.depth
    image_row, plane = row // width, row // (width * height)
    top = (plane // depth * images.depth + plane % depth * 2) * images.height + image_row % height * 2
    return top * images.width + row % width * 2


@compiled
def pooled_affine_activation(input, images, window, start, stop, activation, buffer, operand, zero):
    """activation = average of f(scale · values + shift) over each window, (rows, channels) operands with a padded
    stride. If operands are narrow, a row is summed in `buffer`."""
    channels = input.channels
    scale, shift = elements(input.scale, 0, channels, zero), elements(input.shift, 0, channels, zero)
    fraction, stride = (zero + 1) / window, stride_of(channels, operand)
    for row in range(start, stop):
        first, place = first_pixel(row, images), offset(activation, (row - start) * stride, operand)
        sums = buffer if is_narrow(operand, zero) else place
        output = elements(sums, 0, channels, zero)
        for j in range(channels):
            output[j] = 0
        for i in range(images.has_depth + 1):
            for k in range(images.has_height + 1):
                for pixel in range(2):
                    pixel += first + (i * images.height + k) * images.width
                    if input.activation.formula:
                        _add_formula(input, pixel, channels, output, fraction, zero)
                    else:
                        values = row_of(input.values, pixel, 0, channels)
                        for j in range(channels):
                            x = values[j] * scale[j] + shift[j]
                            output[j] += x * fraction if not x <= zero else zero
        if is_narrow(operand, zero):
            convert(sums, zero, place, operand, channels)
    pad_cells(activation, stop - start, stride, channels, operand, zero)


@compiled
def _add_formula(input, row, channels, output, fraction, zero):
    """output += fraction · f(scale · values + shift) of one pixel."""
    buffer = row_buffer(zero)
    for left in range(0, channels, ROW):
        width = min(ROW, channels - left)
        y = normalized_row(input, row, left, width, buffer, zero)
        apply_formula(input.activation.formula, input.activation, width, buffer, zero)
        for j in range(width):
            output[left + j] += y[j] * fraction
