"""Tiles of images in either memory format, for the stem's Triton kernels: functions that are inlined into them.

A row is a pixel of any image. A tile is BLOCK_ROWS rows × BLOCK_CHANNELS channels, and its last axis is the one that is
contiguous in memory: (rows, channels) in NHWC, with CHANNELS_LAST, and (channels, rows) in NCHW. Values that depend on
the row alone, such as the position of its pixel, are computed once for all channels of a tile. Pointers to images are
in 64 bits, offsets within an image in 32.
"""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl

from .formulas import activate


@triton.jit
def by_row(vector, CHANNELS_LAST: tl.constexpr):
    """A vector over the rows, in the shape that broadcasts with a tile."""
    return vector[:, None] if CHANNELS_LAST else vector[None, :]


@triton.jit
def by_channel(vector, CHANNELS_LAST: tl.constexpr):
    """A vector over the channels, in the shape that broadcasts with a tile."""
    return vector[None, :] if CHANNELS_LAST else vector[:, None]


@triton.jit
def load_channels(pointer, channel, channel_mask, CHANNELS_LAST: tl.constexpr):
    """One value for each channel, in float32."""
    return by_channel(tl.load(pointer + channel, channel_mask, 0.0).to(tl.float32), CHANNELS_LAST)


@triton.jit
def image_pointers(tensor, image, pixels, channels, CHANNELS_LAST: tl.constexpr):
    """Pointers to the start of each row's image, in a tensor whose images have `pixels` pixels."""
    return by_row(tensor + image.to(tl.int64) * (pixels * channels), CHANNELS_LAST)


@triton.jit
def offsets_in_image(pixel, channel, pixels, channels, CHANNELS_LAST: tl.constexpr):
    """The offsets of a tile's elements from the start of their images."""
    if CHANNELS_LAST:
        offsets = (pixel * channels)[:, None] + channel[None, :]
    else:
        offsets = (channel * pixels)[:, None] + pixel[None, :]
    return offsets


@triton.jit
def mask_of_channels(channel, channels, CHANNELS_LAST: tl.constexpr):
    """Whether each channel exists. In NCHW all exist, since BLOCK_CHANNELS divides them; a constant mask is faster."""
    return channel < channels if CHANNELS_LAST else channel >= 0


@triton.jit
def tile_mask(row_mask, channel_mask, CHANNELS_LAST: tl.constexpr):
    """Where both masks are true, in the shape of a tile."""
    return by_row(row_mask, CHANNELS_LAST) & by_channel(channel_mask, CHANNELS_LAST)


@triton.jit
def zero_tile(BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """A tile of zeros in float32."""
    if CHANNELS_LAST:
        tile = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    else:
        tile = tl.zeros((BLOCK_CHANNELS, BLOCK_ROWS), tl.float32)
    return tile


@triton.jit
def sum_of_rows(tile, CHANNELS_LAST: tl.constexpr):
    """One value for each channel."""
    return tl.sum(tile, 0) if CHANNELS_LAST else tl.sum(tile, 1)


@triton.jit
def normalize(z, mean, scale, bias, values):
    """scale · (z − mean) + bias, rounded to the dtype of `values`, in float32."""
    return ((z - mean) * scale + bias).to(values.dtype.element_ty).to(tl.float32)


@triton.jit
def window_maximum(
    values,
    image,
    pixel,
    channel,
    mask,
    mean,
    scale,
    bias,
    channels,
    height,
    width,
    pooled_width,
    KERNEL_Y: tl.constexpr,
    KERNEL_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PADDING_Y: tl.constexpr,
    PADDING_X: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """The maximum of f(scale · (z − mean) + bias) in each pooled pixel's window, z there, and its place in the window.

    PyTorch's pooling chooses the first of equal maxima, but the last NaN. Values are rounded to z's dtype before they
    are compared, as in plain modules: some are equal only then. The caller applies a ReLU, which changes neither a
    positive maximum nor its place.
    """
    top, left = pixel // pooled_width * STRIDE_Y - PADDING_Y, pixel % pooled_width * STRIDE_X - PADDING_X
    images = image_pointers(values, image, height * width, channels, CHANNELS_LAST)
    maximum = tl.full(mask.shape, float("-inf"), tl.float32)
    value = tl.full(mask.shape, 0, tl.float32)
    place = tl.full(mask.shape, 0 if ACTIVATION == "relu" else -1, tl.int32)
    for i in tl.static_range(KERNEL_Y * KERNEL_X):
        y, x = top + i // KERNEL_X, left + i % KERNEL_X
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        inside = mask & by_row(inside, CHANNELS_LAST)
        offsets = offsets_in_image(y * width + x, channel, height * width, channels, CHANNELS_LAST)
        z = tl.load(images + offsets, inside, 0.0).to(tl.float32)
        y = normalize(z, mean, scale, bias, values)
        if ACTIVATION == "relu":
            is_maximum = inside & ((y > maximum) | (y != y))
        else:
            y = activate(y, ACTIVATION, A, B).to(values.dtype.element_ty).to(tl.float32)
            is_maximum = inside & ((y > maximum) | (y != y) | (place < 0))  # the first, where all are −∞
        maximum = tl.where(is_maximum, y, maximum)
        value = tl.where(is_maximum, z, value)
        place = tl.where(is_maximum, i, place)
    return maximum, value, place


@triton.jit
def gathered_gradient(
    grads,
    places,
    cell_y,
    cell_x,
    channel,
    mask,
    channels,
    pooled_height,
    pooled_width,
    Y: tl.constexpr,
    X: tl.constexpr,
    KERNEL_Y: tl.constexpr,
    KERNEL_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """The sum of grad_output over the windows whose maximum a pixel is, in a fixed order.

    The pixel is (Y, X) of the cell of STRIDE_Y × STRIDE_X pixels of the padded image, so that its place in each window
    is a constant. `grads` and `places` point to the start of its image in grad_output and in the places of the maxima.
    """
    total = tl.full(mask.shape, 0, tl.float32)
    for i in tl.static_range((KERNEL_Y - 1 - Y) // STRIDE_Y + 1):
        for j in tl.static_range((KERNEL_X - 1 - X) // STRIDE_X + 1):
            y, x = cell_y - i, cell_x - j
            is_window = (y >= 0) & (y < pooled_height) & (x >= 0) & (x < pooled_width)
            is_window = mask & by_row(is_window, CHANNELS_LAST)
            pixel = y * pooled_width + x
            offsets = offsets_in_image(pixel, channel, pooled_height * pooled_width, channels, CHANNELS_LAST)
            place = (Y + i * STRIDE_Y) * KERNEL_X + X + j * STRIDE_X
            is_maximum = tl.load(places + offsets, is_window, -1) == place
            total += tl.where(is_maximum, tl.load(grads + offsets, is_window, 0.0).to(tl.float32), 0.0)
    return total
