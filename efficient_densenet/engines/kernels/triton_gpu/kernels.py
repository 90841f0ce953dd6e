"""The programs of the fused kernels, in Triton.

Matrices are rows × channels. A `_stride` is how far apart the rows lie; the channels of one lie side by side. A program
that loops takes every so many tiles of rows and writes what it has added up to its own place in `parts`, so that sums
come out the same each time. `UNIT` is a power of two that divides `channels` and every stride, which tells how wide a
load may be. Products and sums are in float32.
"""

# ruff: noqa: N803 (what is known at compilation is in capitals, as is Triton's custom)

import triton
import triton.language as tl

# Sizes differ between layers and batches: a compilation for each kind of them would make the first steps slow.
_SIZES = ["rows", "channels", "height", "width", "values_stride", "pending_stride"]


@triton.jit
def _multiple(size, UNIT: tl.constexpr):
    return size // UNIT * UNIT


@triton.jit
def _offsets(row, stride, column):
    return row.to(tl.int64)[:, None] * stride + column[None, :]


@triton.jit
def _vector(pointer, column, inside):
    return tl.load(pointer + column, inside, 0.0).to(tl.float32)[None, :]


@triton.jit
def _relu(x):
    return tl.where(x < 0, 0.0, x)  # which leaves not-a-number as it is, unlike `maximum`


@triton.jit
def _pixel(row, height, width, at, SIDE: tl.constexpr):
    """Rows of pixels: those `at` some place in the windows of SIDE × SIDE pixels that are `row` when pooled."""
    if SIDE == 1:
        pixel = row.to(tl.int64)
    else:
        across, down = width // SIDE, height // SIDE
        y = row // across % down * SIDE + at // SIDE
        x = row % across * SIDE + at % SIDE
        pixel = (row // across // down).to(tl.int64) * height * width + y * width + x
    return pixel


@triton.jit
def _add(place, values, there, FIRST: tl.constexpr):
    if FIRST:
        tl.store(place, values, there)
    else:
        tl.store(place, tl.load(place, there, 0.0).to(tl.float32) + values, there)


@triton.jit
def _store_two(parts, first, second, column, inside, channels):
    """Two vectors into parts[2, channels]."""
    tl.store(parts + column, first, inside)
    tl.store(parts + channels + column, second, inside)


@triton.jit
def _measure(parts, values, there, count, column, inside, channels):
    """The mean of the `count` rows of a tile and the sum of squares about it, both free of the first sum's rounding."""
    mean = tl.sum(tl.where(there, values, 0.0), 0) / count
    centred = tl.where(there, values - mean[None, :], 0.0)
    rest = tl.sum(centred, 0) / count
    squares = tl.sum(centred * centred, 0) - count * rest * rest
    _store_two(parts, mean + rest, squares, column, inside, channels)


@triton.jit(do_not_specialize=_SIZES)
def measured(
    parts,
    values,
    rows,
    channels,
    values_stride,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """parts[tiles, 2, channels]: of each tile of values[rows, channels]."""
    channels, values_stride = _multiple(channels, UNIT), _multiple(values_stride, UNIT)
    tile = tl.program_id(0)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = column < channels
    there = (row < rows)[:, None] & inside[None, :]
    x = tl.load(values + _offsets(row, values_stride, column), there, 0.0).to(tl.float32)
    count = tl.minimum(BLOCK_ROWS, rows - tile * BLOCK_ROWS)
    _measure(parts + tile.to(tl.int64) * 2 * channels, x, there, count, column, inside, channels)


@triton.jit(do_not_specialize=_SIZES)
def combined(
    found,
    parts,
    rows,
    channels,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """found[2, channels]: mean and variance of all rows, from parts[tiles, 2, channels] of BLOCK_ROWS rows each, by the
    formula of Chan, Golub and LeVeque, in which nothing cancels."""
    column = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = column < channels
    tiles = tl.cdiv(rows, BLOCK_ROWS)
    total = tl.zeros((BLOCK_PARTS, BLOCK_CHANNELS), tl.float32)
    for start in range(0, tiles, BLOCK_PARTS):
        tile = start + tl.arange(0, BLOCK_PARTS)
        there = (tile < tiles)[:, None] & inside[None, :]
        count = tl.minimum(BLOCK_ROWS, rows - tile * BLOCK_ROWS)[:, None]
        total += tl.load(parts + _offsets(tile, 2 * channels, column), there, 0.0) * count
    mean = tl.sum(total, 0) / rows
    rest = tl.zeros((BLOCK_PARTS, BLOCK_CHANNELS), tl.float32)
    squares = tl.zeros((BLOCK_PARTS, BLOCK_CHANNELS), tl.float32)
    for start in range(0, tiles, BLOCK_PARTS):
        tile = start + tl.arange(0, BLOCK_PARTS)
        there = (tile < tiles)[:, None] & inside[None, :]
        count = tl.minimum(BLOCK_ROWS, rows - tile * BLOCK_ROWS)[:, None]
        place = parts + _offsets(tile, 2 * channels, column)
        away = tl.where(there, tl.load(place, there, 0.0) - mean[None, :], 0.0)
        rest += away * count
        squares += tl.load(place + channels, there, 0.0) + away * away * count
    rest_mean = tl.sum(rest, 0) / rows
    variance = tl.sum(squares, 0) / rows - rest_mean * rest_mean
    _store_two(found, mean + rest_mean, variance, column, inside, channels)


@triton.jit(do_not_specialize=_SIZES)
def rectified(
    made,
    values,
    scale,
    shift,
    rows,
    channels,
    values_stride,
    height,
    width,
    SIDE: tl.constexpr,
    RELU: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """made[rows, channels]: the affine map of values, with or without ReLU, in the mean of SIDE × SIDE pixels."""
    channels, values_stride = _multiple(channels, UNIT), _multiple(values_stride, UNIT)
    column = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = column < channels
    a, b = _vector(scale, column, inside), _vector(shift, column, inside)
    for start in range(tl.program_id(1) * BLOCK_ROWS, rows, tl.num_programs(1) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        there = (row < rows)[:, None] & inside[None, :]
        total = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
        for at in tl.static_range(SIDE * SIDE):
            pixel = _pixel(row, height, width, at, SIDE)
            x = tl.load(values + _offsets(pixel, values_stride, column), there, 0.0).to(tl.float32) * a + b
            total += _relu(x) if RELU else x
        tl.store(made + _offsets(row, channels, column), total * (1.0 / (SIDE * SIDE)), there)


@triton.jit(do_not_specialize=_SIZES)
def collected(
    parts,
    grad_accum,
    gradient,
    values,
    scale,
    shift,
    grad_scale,
    rows,
    channels,
    pending_stride,
    values_stride,
    height,
    width,
    SIDE: tl.constexpr,
    RELU: tl.constexpr,
    FIRST: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """pending += share * the gradient of what `rectified` reads, gradient[rows, channels] being that of what it made,
    or `=` where it is the first; parts[splits, 2, channels]: the sums of the former and of its product with values."""
    channels, values_stride = _multiple(channels, UNIT), _multiple(values_stride, UNIT)
    pending_stride = _multiple(pending_stride, UNIT)
    column = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = column < channels
    a, b, c = _vector(scale, column, inside), _vector(shift, column, inside), _vector(grad_scale, column, inside)
    grad_sum = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    product_sum = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_ROWS, rows, tl.num_programs(1) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        there = (row < rows)[:, None] & inside[None, :]
        whole = tl.load(gradient + _offsets(row, channels, column), there, 0.0).to(tl.float32)
        whole = whole * (1.0 / (SIDE * SIDE))
        for at in tl.static_range(SIDE * SIDE):
            pixel = _pixel(row, height, width, at, SIDE)
            x = tl.load(values + _offsets(pixel, values_stride, column), there, 0.0).to(tl.float32)
            grad = tl.where(x * a + b <= 0, 0.0, whole) if RELU else whole
            _add(grad_accum + _offsets(pixel, pending_stride, column), grad * c, there, FIRST)
            grad_sum += grad
            product_sum += grad * x
    parts += tl.program_id(1).to(tl.int64) * 2 * channels
    _store_two(parts, tl.sum(grad_sum, 0), tl.sum(product_sum, 0), column, inside, channels)


@triton.jit(do_not_specialize=_SIZES)
def batch_norm_grad_input(
    found,
    grad_accum,
    values,
    scale,
    shift,
    grad_scale,
    rows,
    channels,
    pending_stride,
    values_stride,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """found[rows, channels] = scale * values + shift + share * pending."""
    channels, values_stride = _multiple(channels, UNIT), _multiple(values_stride, UNIT)
    pending_stride = _multiple(pending_stride, UNIT)
    column = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = column < channels
    a, b, c = _vector(scale, column, inside), _vector(shift, column, inside), _vector(grad_scale, column, inside)
    for start in range(tl.program_id(1) * BLOCK_ROWS, rows, tl.num_programs(1) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        there = (row < rows)[:, None] & inside[None, :]
        x = tl.load(values + _offsets(row, values_stride, column), there, 0.0).to(tl.float32)
        grad = tl.load(grad_accum + _offsets(row, pending_stride, column), there, 0.0).to(tl.float32)
        tl.store(found + _offsets(row, channels, column), x * a + b + grad * c, there)


@triton.jit(do_not_specialize=_SIZES)
def conv1x1_forward(
    made,
    parts,
    values,
    scale,
    shift,
    weight,
    rows,
    channels,
    values_stride,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """made[rows, width] = ReLU(scale * values + shift) @ weight[width, channels].T; parts[tiles, 2, width] of it."""
    channels, values_stride = _multiple(channels, UNIT), _multiple(values_stride, UNIT)
    tile = tl.program_id(0)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    made_column = tl.arange(0, BLOCK_WIDTH)
    there, made_inside = (row < rows)[:, None], made_column < WIDTH
    total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    for start in range(0, channels, BLOCK_CHANNELS):
        column = start + tl.arange(0, BLOCK_CHANNELS)
        inside = column < channels
        x = tl.load(values + _offsets(row, values_stride, column), there & inside[None, :], 0.0).to(tl.float32)
        x = _relu(x * _vector(scale, column, inside) + _vector(shift, column, inside))
        w = tl.load(weight + _offsets(made_column, channels, column), made_inside[:, None] & inside[None, :], 0.0)
        total = tl.dot(x.to(w.dtype), tl.trans(w), total, input_precision=PRECISION)
    result = total.to(made.dtype.element_ty)
    tl.store(made + _offsets(row, WIDTH, made_column), result, there & made_inside[None, :])
    count = tl.minimum(BLOCK_ROWS, rows - tile * BLOCK_ROWS)
    parts += tile.to(tl.int64) * 2 * WIDTH
    _measure(parts, result.to(tl.float32), there, count, made_column, made_inside, WIDTH)


@triton.jit(do_not_specialize=_SIZES)
def conv1x1_backward(
    weight_parts,
    parts,
    grad_accum,
    gradient,
    values,
    scale,
    shift,
    grad_scale,
    weight,
    rows,
    channels,
    pending_stride,
    values_stride,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    LEARNS: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """What `collected` does, the gradient being gradient[rows, width] @ weight[width, channels], which exists a tile at
    a time; where the weight learns, weight_parts[splits, width, channels]: gradient.T @ ReLU(scale * values + shift).
    """
    channels, values_stride = _multiple(channels, UNIT), _multiple(values_stride, UNIT)
    pending_stride = _multiple(pending_stride, UNIT)
    column = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    made_column = tl.arange(0, BLOCK_WIDTH)
    inside, made_inside = column < channels, made_column < WIDTH
    a, b, c = _vector(scale, column, inside), _vector(shift, column, inside), _vector(grad_scale, column, inside)
    weight_place, weight_there = _offsets(made_column, channels, column), made_inside[:, None] & inside[None, :]
    w = tl.load(weight + weight_place, weight_there, 0.0)
    of_weight = tl.zeros((BLOCK_WIDTH, BLOCK_CHANNELS), tl.float32)
    grad_sum = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    product_sum = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_ROWS, rows, tl.num_programs(1) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        there = (row < rows)[:, None]
        of_made = gradient + _offsets(row, WIDTH, made_column)
        of_made = tl.load(of_made, there & made_inside[None, :], 0.0).to(w.dtype)
        there = there & inside[None, :]
        x = tl.load(values + _offsets(row, values_stride, column), there, 0.0).to(tl.float32)
        activation = _relu(x * a + b)
        if LEARNS:
            of_weight = tl.dot(tl.trans(of_made), activation.to(w.dtype), of_weight, input_precision=PRECISION)
        grad = tl.where(activation <= 0, 0.0, tl.dot(of_made, w, input_precision=PRECISION))
        _add(grad_accum + _offsets(row, pending_stride, column), grad * c, there, FIRST)
        grad_sum += grad
        product_sum += grad * x
    split = tl.program_id(1).to(tl.int64)
    if LEARNS:
        tl.store(weight_parts + split * WIDTH * channels + weight_place, of_weight, weight_there)
    parts += split * 2 * channels
    _store_two(parts, tl.sum(grad_sum, 0), tl.sum(product_sum, 0), column, inside, channels)
