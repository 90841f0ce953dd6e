"""The kernels between a stem's convolutions, in Triton: statistics, and batch norm → activation → max pooling.

`values` is z, the convolution's output, (images, channels, height, width) in either memory format. Tiles are as in
`image_tiles`: a row is a pixel of z or a pixel of the pooled images. Sums are in float32, in a fixed order.
DIVISIBILITY is a power of two that divides the number of channels in NHWC, and of pixels in NCHW, so that the compiler
may vectorize.
"""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl

from .device_functions import SIZES, VECTORS, divisible, store_pair
from .formulas import grad_before_activation, relu
from .image_tiles import (
    by_row,
    gathered_gradient,
    image_pointers,
    load_channels,
    mask_of_channels,
    normalize,
    offsets_in_image,
    sum_of_rows,
    tile_mask,
    window_maximum,
    zero_tile,
)
from .statistics_kernels import store_tile_statistics

STEM_SIZES = [*SIZES, "pooled_height", "pooled_width"]
"""The sizes on which Triton must not specialize."""


@triton.jit(do_not_specialize=STEM_SIZES)
def image_statistics(
    stats,
    values,
    num_rows,
    channels,
    height,
    width,
    CHANNELS_LAST: tl.constexpr,
    DIVISIBILITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """stats[row tiles, 2, channels] = mean and M2 of each tile of pixels. Grid: (row tiles, channel tiles)."""
    pixels = height * width
    if CHANNELS_LAST:
        channels = divisible(channels, DIVISIBILITY)
    else:
        pixels, num_rows = divisible(pixels, DIVISIBILITY), divisible(num_rows, DIVISIBILITY)
    tile = tl.program_id(0)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    row_mask, channel_mask = row < num_rows, mask_of_channels(channel, channels, CHANNELS_LAST)
    images = image_pointers(values, row // pixels, pixels, channels, CHANNELS_LAST)
    pointers = images + offsets_in_image(row % pixels, channel, pixels, channels, CHANNELS_LAST)
    x = tl.load(pointers, tile_mask(row_mask, channel_mask, CHANNELS_LAST), 0.0).to(tl.float32)
    if not CHANNELS_LAST:
        x = tl.trans(x)
    count = tl.minimum(BLOCK_ROWS, num_rows - tile * BLOCK_ROWS)
    stats += tile.to(tl.int64) * 2 * channels
    store_tile_statistics(stats, x, row_mask[:, None], count, channel, channel_mask, channels)


@triton.jit(do_not_specialize=STEM_SIZES, do_not_specialize_on_alignment=VECTORS)
def norm_activation_max_pool_forward(
    output,
    values,
    norm_weight,
    norm_bias,
    mean,
    inv_std,
    num_rows,
    channels,
    height,
    width,
    pooled_height,
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
    DIVISIBILITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """output = max_pool(f(norm_weight · (values − mean) · inv_std + norm_bias)). A row is a pixel of the output.

    Grid: (row tiles, channel tiles).
    """
    if CHANNELS_LAST:
        channels = divisible(channels, DIVISIBILITY)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = mask_of_channels(channel, channels, CHANNELS_LAST)
    mask = tile_mask(row < num_rows, channel_mask, CHANNELS_LAST)
    center = load_channels(mean, channel, channel_mask, CHANNELS_LAST)
    scale = load_channels(norm_weight, channel, channel_mask, CHANNELS_LAST)
    scale *= load_channels(inv_std, channel, channel_mask, CHANNELS_LAST)
    bias = load_channels(norm_bias, channel, channel_mask, CHANNELS_LAST)
    pooled_pixels = pooled_height * pooled_width
    image, pixel = row // pooled_pixels, row % pooled_pixels
    maximum, _, _ = window_maximum(
        values, image, pixel, channel, mask, center, scale, bias, channels, height, width, pooled_width,
        KERNEL_Y, KERNEL_X, STRIDE_Y, STRIDE_X, PADDING_Y, PADDING_X, ACTIVATION, A, B, CHANNELS_LAST,
    )  # fmt: skip
    outputs = image_pointers(output, image, pooled_pixels, channels, CHANNELS_LAST)
    outputs += offsets_in_image(pixel, channel, pooled_pixels, channels, CHANNELS_LAST)
    tl.store(outputs, relu(maximum) if ACTIVATION == "relu" else maximum, mask)


@triton.jit(do_not_specialize=STEM_SIZES, do_not_specialize_on_alignment=VECTORS)
def norm_activation_max_pool_backward_reduce(
    indices,
    partial_sums,
    grad_output,
    values,
    norm_weight,
    norm_bias,
    mean,
    inv_std,
    num_rows,
    channels,
    height,
    width,
    pooled_height,
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
    DIVISIBILITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """indices = each maximum's place in its window, −1 where a ReLU is inactive. A row is a pooled pixel.

    With g = grad_output · f'(norm(z)): partial_sums[splits, 2, channels] = Σ g and Σ g · (z − mean).
    Grid: (channel tiles, splits).
    """
    if CHANNELS_LAST:
        channels = divisible(channels, DIVISIBILITY)
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = mask_of_channels(channel, channels, CHANNELS_LAST)
    center = load_channels(mean, channel, channel_mask, CHANNELS_LAST)
    scale = load_channels(norm_weight, channel, channel_mask, CHANNELS_LAST)
    scale *= load_channels(inv_std, channel, channel_mask, CHANNELS_LAST)
    bias = load_channels(norm_bias, channel, channel_mask, CHANNELS_LAST)
    pooled_pixels = pooled_height * pooled_width
    grad_sum = zero_tile(BLOCK_ROWS, BLOCK_CHANNELS, CHANNELS_LAST)
    product_sum = zero_tile(BLOCK_ROWS, BLOCK_CHANNELS, CHANNELS_LAST)
    for start in range(tl.program_id(1) * BLOCK_ROWS, num_rows, tl.num_programs(1) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = tile_mask(row < num_rows, channel_mask, CHANNELS_LAST)
        image, pixel = row // pooled_pixels, row % pooled_pixels
        maximum, z, place = window_maximum(
            values, image, pixel, channel, mask, center, scale, bias, channels, height, width, pooled_width,
            KERNEL_Y, KERNEL_X, STRIDE_Y, STRIDE_X, PADDING_Y, PADDING_X, ACTIVATION, A, B, CHANNELS_LAST,
        )  # fmt: skip
        if ACTIVATION == "relu":
            place = tl.where(maximum <= 0, -1, place)
        offsets = offsets_in_image(pixel, channel, pooled_pixels, channels, CHANNELS_LAST)
        places = image_pointers(indices, image, pooled_pixels, channels, CHANNELS_LAST) + offsets
        tl.store(places, place.to(tl.int8), mask)
        grads = image_pointers(grad_output, image, pooled_pixels, channels, CHANNELS_LAST) + offsets
        grad = tl.load(grads, mask, 0.0).to(tl.float32)
        normalized = normalize(z, center, scale, bias, values)
        grad = grad_before_activation(grad, maximum, normalized, ACTIVATION, A, B)
        grad_sum += grad
        product_sum += tl.where(mask, grad * (z - center), 0.0)
    partial_sums += tl.program_id(1).to(tl.int64) * 2 * channels
    grad_sum, product_sum = sum_of_rows(grad_sum, CHANNELS_LAST), sum_of_rows(product_sum, CHANNELS_LAST)
    store_pair(partial_sums, grad_sum, product_sum, channel, channel_mask, channels)


@triton.jit(do_not_specialize=STEM_SIZES, do_not_specialize_on_alignment=VECTORS)
def norm_activation_max_pool_backward(
    grad_values,
    indices,
    grad_output,
    values,
    norm_weight,
    norm_bias,
    mean,
    inv_std,
    sum_grad_weight,
    sum_grad_bias,
    per_value,
    num_rows,
    channels,
    height,
    width,
    pooled_height,
    pooled_width,
    FROZEN: tl.constexpr,
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
    DIVISIBILITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """grad_values = the gradient of z, given the sums of the norm's gradients. It may be `values`.

    With x̂ = (z − mean) · r, it is γ · r · (g − (Σ g + x̂ · Σ g·x̂) · per_value), or γ · r · g under a FROZEN norm. g
    is grad_output scattered to the maxima, times f'(norm(z)) unless f is a ReLU, of which `indices` are all active. A
    row is a cell of STRIDE_Y × STRIDE_X pixels of the padded images. Grid: (row tiles, channel tiles).
    """
    if CHANNELS_LAST:
        channels = divisible(channels, DIVISIBILITY)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = mask_of_channels(channel, channels, CHANNELS_LAST)
    mask = tile_mask(row < num_rows, channel_mask, CHANNELS_LAST)
    center = load_channels(mean, channel, channel_mask, CHANNELS_LAST)
    r = load_channels(inv_std, channel, channel_mask, CHANNELS_LAST)
    scale = load_channels(norm_weight, channel, channel_mask, CHANNELS_LAST) * r
    bias = load_channels(norm_bias, channel, channel_mask, CHANNELS_LAST)
    slope = -scale * per_value * r * load_channels(sum_grad_weight, channel, channel_mask, CHANNELS_LAST)
    constant = -scale * per_value * load_channels(sum_grad_bias, channel, channel_mask, CHANNELS_LAST)
    cells_x = (width + PADDING_X + STRIDE_X - 1) // STRIDE_X
    cells = (height + PADDING_Y + STRIDE_Y - 1) // STRIDE_Y * cells_x
    image, cell_y, cell_x = row // cells, row % cells // cells_x, row % cells_x
    grads = image_pointers(grad_output, image, pooled_height * pooled_width, channels, CHANNELS_LAST)
    places = image_pointers(indices, image, pooled_height * pooled_width, channels, CHANNELS_LAST)
    inputs = image_pointers(values, image, height * width, channels, CHANNELS_LAST)
    outputs = image_pointers(grad_values, image, height * width, channels, CHANNELS_LAST)
    for i in tl.static_range(STRIDE_Y * STRIDE_X):
        y, x = cell_y * STRIDE_Y + i // STRIDE_X - PADDING_Y, cell_x * STRIDE_X + i % STRIDE_X - PADDING_X
        inside = mask & by_row((y >= 0) & (y < height) & (x >= 0) & (x < width), CHANNELS_LAST)
        grad = gathered_gradient(
            grads, places, cell_y, cell_x, channel, inside, channels, pooled_height, pooled_width,
            i // STRIDE_X, i % STRIDE_X, KERNEL_Y, KERNEL_X, STRIDE_Y, STRIDE_X, CHANNELS_LAST,
        )  # fmt: skip
        offsets = offsets_in_image(y * width + x, channel, height * width, channels, CHANNELS_LAST)
        if ACTIVATION != "relu" or not FROZEN:
            z = tl.load(inputs + offsets, inside, 0.0).to(tl.float32)
        if ACTIVATION != "relu":
            normalized = normalize(z, center, scale, bias, values)
            grad = grad_before_activation(grad, normalized, normalized, ACTIVATION, A, B)
        result = scale * grad
        if not FROZEN:
            result += (z - center) * slope + constant
        tl.store(outputs + offsets, result, inside)
