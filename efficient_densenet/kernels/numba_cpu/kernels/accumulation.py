"""The epilogue of every backward: the activation's derivative, the accumulation of the gradient, and the two sums for
the batch norm."""

from numba import carray

from ..compiler.intrinsics import compiled, inlined, stack_buffer
from .formulas import ROW, apply_formula, normalized_row, row_buffer
from .memory import clear, elements, prefetch_row, row_of
from .pooling import first_pixel
from .threads import partition

_COLUMNS = ROW
"""The number of channels that are summed at once, in registers or in the L1 cache."""

_RUN = 32
"""The number of pixels that are summed in the dtype of the arithmetic. These short sums are added up in float64."""

_sums_buffer = stack_buffer(_COLUMNS)


@compiled
def clear_sums(sums, thread):
    count = 2 * sums.channels
    clear(sums.partials + thread * count * 8, count, 1.0)


@inlined
def _relu_pixel(args, row, left, grad_output, grads, products, zero):
    """Accumulate the gradient of one pixel, masked by the ReLU."""
    input, accumulator, width = args.conv.input, args.conv.accumulator, len(grad_output)
    overwrite = accumulator.overwrite
    values, grad_accum = row_of(input.values, row, left, width), row_of(accumulator.grad_accum, row, left, width)
    scale, shift = elements(input.scale, left, width, zero), elements(input.shift, left, width, zero)
    grad_scale = elements(accumulator.grad_scale, left, width, zero)
    for j in range(width):
        grad = grad_output[j] if not values[j] * scale[j] + shift[j] <= zero else zero
        grads[j] += grad
        products[j] += grad * values[j]
        grad_accum[j] = grad * grad_scale[j] + (zero if overwrite else grad_accum[j])


@inlined
def _formula_pixel(args, row, left, grad_output, grads, products, zero):
    """Accumulate the gradient of one pixel, times the activation's derivative."""
    input, accumulator, width, buffer = args.conv.input, args.conv.accumulator, len(grad_output), row_buffer(zero)
    overwrite = accumulator.overwrite
    derivative = normalized_row(input, row, left, width, buffer, zero)
    apply_formula(input.activation.derivative, input.activation, width, buffer, zero)
    values, grad_accum = row_of(input.values, row, left, width), row_of(accumulator.grad_accum, row, left, width)
    grad_scale = elements(accumulator.grad_scale, left, width, zero)
    for j in range(width):
        grad = grad_output[j] * derivative[j]
        grads[j] += grad
        products[j] += grad * values[j]
        grad_accum[j] = grad * grad_scale[j] + (zero if overwrite else grad_accum[j])


@inlined
def _affine_row(args, row, left, grad_output, grads, products, zero):
    """Accumulate the gradient of one pixel, without an activation."""
    width, accumulator = len(grad_output), args.accumulator
    overwrite = accumulator.overwrite
    prefetch_row(accumulator.grad_accum, row, args.gradients.channels)
    values, grad_accum = row_of(args.values, row, left, width), row_of(accumulator.grad_accum, row, left, width)
    grad_scale = elements(accumulator.grad_scale, left, width, zero)
    for j in range(width):
        grad = grad_output[j]
        grads[j] += grad
        products[j] += grad * values[j]
        grad_accum[j] = grad * grad_scale[j] + (zero if overwrite else grad_accum[j])


def _prefetched(backward_pixel):
    """`backward_pixel` for a row of a convolution without pooling."""

    @inlined
    def backward_row(args, row, left, grad_output, grads, products, zero):
        prefetch_row(args.conv.accumulator.grad_accum, row, args.conv.gradients.channels)
        backward_pixel(args, row, left, grad_output, grads, products, zero)

    return backward_row


def _in_window(backward_pixel):
    """`backward_pixel` for every pixel in the window of a pooled output row."""

    @inlined
    def backward_row(args, row, left, grad_output, grads, products, zero):
        images = args.images
        first = first_pixel(row, images)
        for i in range(images.has_depth + 1):
            for k in range(images.has_height + 1):
                for pixel in range(first, first + 2):
                    pixel += (i * images.height + k) * images.width
                    backward_pixel(args, pixel, left, grad_output, grads, products, zero)

    return backward_row


def _accumulation(backward_row):
    """A function that accumulates a tile's gradient, row by row."""

    @compiled
    def accumulate(args, sums, run, thread, start, stop, grad_output, stride, element, zero):
        """Accumulate rows start to stop of grad_output (rows, channels), which has the dtype of `element`. `run` rows
        at a time are summed in the dtype of `zero`."""
        channels = sums.channels
        grads, products = carray(_sums_buffer(zero), (_COLUMNS,)), carray(_sums_buffer(zero), (_COLUMNS,))
        for left in range(0, channels, _COLUMNS):
            width = min(_COLUMNS, channels - left)
            sum_of_grads = elements(sums.partials, thread * 2 * channels + left, width, 1.0)
            sum_of_products = elements(sums.partials, (thread * 2 + 1) * channels + left, width, 1.0)
            for begin in range(start, stop, run):
                for j in range(width):
                    grads[j] = products[j] = 0
                for row in range(begin, min(begin + run, stop)):
                    grad = elements(grad_output, (row - start) * stride + left, width, element)
                    backward_row(args, row, left, grad, grads, products, zero)
                for j in range(width):
                    sum_of_grads[j] += grads[j]
                    sum_of_products[j] += products[j]

    return accumulate


_accumulate_affine = _accumulation(_affine_row)
_accumulate_relu = _accumulation(_prefetched(_relu_pixel))
_accumulate_formula = _accumulation(_prefetched(_formula_pixel))
_accumulate_pooled_relu = _accumulation(_in_window(_relu_pixel))
_accumulate_pooled_formula = _accumulation(_in_window(_formula_pixel))


@compiled
def accumulate_affine_grad(args, thread, start, stop, grad_output, stride, zero):
    """Accumulate rows start to stop of grad_output, the gradient of a norm's output."""
    element = args.grad_output.element
    _accumulate_affine(args, args.gradients, _RUN, thread, start, stop, grad_output, stride, element, zero)


@compiled
def accumulate_grad(args, thread, start, stop, grad_output, stride, zero):
    """Accumulate rows start to stop of grad_output, the gradient of a convolution's input; with pooling, the gradient
    of every pixel in the windows of these output rows."""
    sums, run = args.conv.gradients, _RUN // args.window
    if args.conv.input.activation.formula:
        if args.window > 1:
            _accumulate_pooled_formula(args, sums, run, thread, start, stop, grad_output, stride, zero, zero)
        else:
            _accumulate_formula(args, sums, run, thread, start, stop, grad_output, stride, zero, zero)
    elif args.window > 1:
        _accumulate_pooled_relu(args, sums, run, thread, start, stop, grad_output, stride, zero, zero)
    else:
        _accumulate_relu(args, sums, run, thread, start, stop, grad_output, stride, zero, zero)


@compiled
def reduce_sums(gradients, thread, threads, zero):
    """Add up the two sums of all threads, compute the norm's gradients, and add γ times these gradients to `sums`.

    grad_bias = Σ grad and grad_weight = (Σ grad · values − μ · Σ grad) · r. Each thread has some of the channels.
    """
    channels, norm, sums = gradients.channels, gradients.norm, gradients.sums
    grad_bias = elements(gradients.grad_bias, 0, channels, zero)
    grad_weight = elements(gradients.grad_weight, 0, channels, zero)
    weight, mean = elements(norm.weight, 0, channels, zero), elements(norm.mean, 0, channels, zero)
    inv_std = elements(norm.inv_std, 0, channels, zero)
    grad_sum = elements(sums.data, 0, channels, zero)
    product_sum = elements(sums.data, sums.row_stride, channels, zero)
    partials = elements(gradients.partials, 0, threads * 2 * channels, 1.0)
    first, last = partition(channels, thread, threads)
    for j in range(first, last):
        grads = products = 0.0
        for i in range(threads):
            grads += partials[2 * i * channels + j]
            products += partials[(2 * i + 1) * channels + j]
        if norm.mean:
            products -= mean[j] * grads
        grad_bias[j], grad_weight[j] = grads, products * inv_std[j]
        if sums.data:
            grad_sum[j] += weight[j] * grad_bias[j]
            product_sum[j] += weight[j] * grad_weight[j]
