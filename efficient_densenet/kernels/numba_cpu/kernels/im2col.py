"""A 3×3 convolution (3 or 3×3×3 in other dimensions) as a matrix product.

The forward multiplies first, (pixels, in_channels) @ (in_channels, taps · out_channels), and `col2im` sums the taps'
products for each pixel. The backward multiplies `im2col` of grad_output, (pixels, taps · out_channels). Both pad with
zeros outside the image. Pixels are in the order (image, depth, height, width); z, y and x are the last three indices.
"""

from ..compiler.intrinsics import compiled, inlined
from .memory import clear, convert, elements, is_narrow, offset, panel_columns


@compiled
def _place(row, images):
    """The indices x, y and z of a pixel in its image."""
    image_row = row // images.width
    return row % images.width, image_row % images.height, image_row // images.height % images.depth


@compiled
def _next_place(x, y, z, images):
    if x + 1 < images.width:
        return x + 1, y, z
    if y + 1 < images.height:
        return 0, y + 1, z
    return 0, 0, z + 1 if z + 1 < images.depth else 0


@inlined
def im2col(images, dilation, grad, channels, start, stop, output, stride, operand, zero):
    """Rows start to stop of the columns of grad (pixels, channels), as operands: all taps around each pixel, padded
    with zeros to whole panels."""
    width, height, depth = images.width, images.height, images.depth
    has_depth, has_height = images.has_depth, images.has_height
    taps = 3 * (2 * has_height + 1) * (2 * has_depth + 1)
    padding = panel_columns(taps * channels, zero) - taps * channels
    x, y, z = _place(start, images)
    for row in range(start, stop):
        at = (row - start) * stride
        left, right = 0 if x >= dilation else 1, 3 if x + dilation < width else 2
        for i in range(-has_depth, has_depth + 1):
            for j in range(-has_height, has_height + 1):
                columns = elements(output, at, 3 * channels, operand)
                inside = 0 <= z + i * dilation < depth and 0 <= y + j * dilation < height
                if not inside or left or right < 3:
                    for o in range(3 * channels):
                        columns[o] = 0.0
                if inside:
                    middle = row + (i * height + j) * width * dilation
                    contiguous = right - left if dilation == 1 else 1  # the number of taps that are copied at once
                    for k in range(left, right, contiguous):
                        at_tap = (middle + (k - 1) * dilation) * channels
                        source = elements(grad.data, at_tap, contiguous * channels, grad.element)
                        columns = elements(output, at + k * channels, contiguous * channels, operand)
                        for o in range(contiguous * channels):
                            columns[o] = source[o]
                at += 3 * channels
        clear(offset(output, at, operand), padding, operand)
        x, y, z = _next_place(x, y, z, images)


@inlined
def col2im(images, dilation, products, origin, start, stop, output, channels, buffer, zero):
    """Rows start to stop of the output (pixels, channels): the sum of all taps' products for each pixel.

    `products` are (pixels, taps · channels), padded to whole panels, and begin with row `origin`. If the output is
    narrow, a row is summed in `buffer` and then rounded.
    """
    width, height, depth = images.width, images.height, images.depth
    has_depth, has_height = images.has_depth, images.has_height
    stride = panel_columns(3 * (2 * has_height + 1) * (2 * has_depth + 1) * channels, zero)
    x, y, z = _place(start, images)
    for row in range(start, stop):
        sums = buffer if is_narrow(output.element, zero) else offset(output.data, row * output.row_stride, zero)
        clear(sums, channels, zero)
        total, at = elements(sums, 0, channels, zero), 0
        for i in range(-has_depth, has_depth + 1):
            for j in range(-has_height, has_height + 1):
                if 0 <= z + i * dilation < depth and 0 <= y + j * dilation < height:
                    index = (row - origin + (i * height + j) * width * dilation) * stride + at
                    if dilation <= x < width - dilation:
                        left = elements(products, index - dilation * stride, channels, zero)
                        middle = elements(products, index + channels, channels, zero)
                        right = elements(products, index + 2 * channels + dilation * stride, channels, zero)
                        for o in range(channels):
                            total[o] += left[o] + middle[o] + right[o]
                    else:
                        for k in range(3):
                            if 0 <= x + (k - 1) * dilation < width:
                                one = elements(
                                    products, index + k * channels + (k - 1) * dilation * stride, channels, zero
                                )
                                for o in range(channels):
                                    total[o] += one[o]
                at += 3 * channels
        if is_narrow(output.element, zero):
            written = offset(output.data, row * output.row_stride, output.element)
            convert(sums, zero, written, output.element, channels)
        x, y, z = _next_place(x, y, z, images)
