"""The kernels, one function for each; matrices, vectors and groups of arguments are as in `interface`.

Every thread calls the kernel with the same record. It processes its own rows, one tile after another, and adds to its
own partial sums, which all threads reduce after a barrier. A tile's intermediate results are in the thread's scratch
and so in its L1 and L2 caches.
"""

from numba import carray

from .. import arguments
from ..compiler.compilation import kernel
from ..compiler.intrinsics import compiled
from .accumulation import accumulate_affine_grad, accumulate_grad, clear_sums, reduce_sums
from .affine import affine_activation, affine_vectors, batch_norm_grad_rows, batch_norm_grad_vectors
from .convolution import (
    add_grad_weight,
    clear_grad_weight,
    conv1x1_product,
    conv3x3_product,
    grad_activation,
    reduce_grad_weight,
    weight_columns,
)
from .gemm import pack_weight
from .im2col import col2im, im2col
from .memory import buffer_stride_of, convert, copy, offset, pad_cells, stride_of
from .pooling import pooled_affine_activation
from .statistics import clear_statistics, reduce_statistics, update_statistics
from .threads import barrier, partition, this_thread


@kernel(arguments.BatchStatisticsArguments)
def batch_statistics(record):
    """The statistics of each channel of values (pixels, channels), by Chan's parallel variance."""
    args = carray(record, 1)[0]
    thread, threads = this_thread(args.openmp)
    first, last = partition(args.rows, thread, threads)
    clear_statistics(args.statistics, thread)
    for start in range(first, last, args.tile):
        stop = min(start + args.tile, last)
        update_statistics(args.statistics, args.values, thread, start, stop)
    reduce_statistics(args.openmp, args.statistics, args.rows, thread, threads, args.zero)


@kernel(arguments.BatchNormGradInputArguments)
def batch_norm_grad_input(record):
    """grad_input = r · (g − mean(g) − x̂ · mean(g · x̂)), all (pixels, channels)."""
    args = carray(record, 1)[0]
    thread, threads = this_thread(args.openmp)
    first, last = partition(args.rows, thread, threads)
    stride, element = args.grad_input.row_stride, args.grad_input.element
    output = offset(args.grad_input.data, first * stride, element)
    batch_norm_grad_vectors(args.grad, thread, threads, args.zero)
    barrier(args.openmp)
    batch_norm_grad_rows(args.grad, first, last, output, stride, element, args.zero)


@kernel(arguments.AffineBackwardArguments)
def affine_backward(record):
    """grad_accum += grad_scale · grad_output, Σ grad_output and Σ grad_output · values, all (pixels, channels)."""
    args = carray(record, 1)[0]
    thread, threads = this_thread(args.openmp)
    first, last = partition(args.rows, thread, threads)
    stride, element, zero = args.grad_output.row_stride, args.grad_output.element, args.zero
    clear_sums(args.gradients, thread)
    for start in range(first, last, args.tile):
        stop = min(start + args.tile, last)
        grad = offset(args.grad_output.data, start * stride, element)
        accumulate_affine_grad(args, thread, start, stop, grad, stride, zero)
    barrier(args.openmp)
    reduce_sums(args.gradients, thread, threads, zero)


@kernel(arguments.ConvForwardArguments)
def conv1x1_forward(record):
    """output (pixels, out_channels) = y @ weight.T for y = f(scale · values + shift), or the average of y over each
    pooling window; and optionally the output's statistics.

    The affine map, the activation f and the pooling are the product's prologue, the statistics its epilogue, a tile at
    a time.
    """
    args = carray(record, 1)[0]
    thread, threads = this_thread(args.openmp)
    first, last = partition(args.rows, thread, threads)
    conv, zero = args.conv, args.zero
    activation = offset(args.scratch.data, thread * args.scratch.thread_stride, zero)
    product = _product_buffer(activation, args.tile, conv.weight)
    pack_weight(conv.weight, thread, threads, zero)
    affine_vectors(conv.input, thread, threads, zero)
    if args.statistics.channels:
        clear_statistics(args.statistics, thread)
    barrier(args.openmp)
    for start in range(first, last, args.tile):
        stop = min(start + args.tile, last)
        _fill_activation(args, thread, start, stop, activation)
        conv1x1_product(conv, start, stop, activation, product, zero)
        if args.statistics.channels:
            update_statistics(args.statistics, conv.output, thread, start, stop)
    if args.statistics.channels:
        reduce_statistics(args.openmp, args.statistics, args.rows, thread, threads, zero)


@kernel(arguments.ConvForwardArguments)
def conv3x3_forward(record):
    """output (pixels, out_channels) = conv3x3(f(scale · values + shift)), and optionally its statistics.

    The products (pixels, taps · out_channels) run `halo` rows ahead of the outputs that col2im sums from them; the last
    products are kept for the next tile. A thread computes the halo around its rows itself.
    """
    args = carray(record, 1)[0]
    thread, threads = this_thread(args.openmp)
    first, last = partition(args.rows, thread, threads)
    conv, tile, halo, zero = args.conv, args.tile, args.halo, args.zero
    columns = weight_columns(conv.weight, zero)
    activation = offset(args.scratch.data, thread * args.scratch.thread_stride, zero)
    products = _product_buffer(activation, tile, conv.weight)
    row_sums = _row_buffer(args.scratch, thread, conv.weight.out_channels, zero)
    origin = done = max(0, first - halo)  # the first row of the products, and one past the last
    pack_weight(conv.weight, thread, threads, zero)
    affine_vectors(conv.input, thread, threads, zero)
    if args.statistics.channels:
        clear_statistics(args.statistics, thread)
    barrier(args.openmp)
    for start in range(first, last, tile):
        stop = min(start + tile, last)
        end = min(args.rows, stop + halo)
        if end - origin > tile + 3 * halo:  # no room: earlier products than of `halo` rows are no longer needed
            needed = offset(products, (start - halo - origin) * columns, zero)
            copy(needed, products, (done - start + halo) * columns, zero)
            origin = start - halo
        while done < end:
            rows, output = min(tile, end - done), offset(products, (done - origin) * columns, zero)
            affine_activation(conv.input, done, done + rows, activation, conv.weight.operand, zero)
            conv3x3_product(conv.weight, rows, activation, output, columns, zero)
            done += rows
        width = conv.weight.out_channels
        col2im(args.images, args.dilation, products, origin, start, stop, conv.output, width, row_sums, zero)
        if args.statistics.channels:
            update_statistics(args.statistics, conv.output, thread, start, stop)
    if args.statistics.channels:
        reduce_statistics(args.openmp, args.statistics, args.rows, thread, threads, zero)


@kernel(arguments.ConvBackwardArguments)
def conv_backward(record):
    """The gradient of the weight and the input of a 1×1, 3×3 or pooled 1×1 convolution.

    With grad, (rows, taps · out_channels), as `_fill_grad` computes it: grad_weight = grad.T @ activation, taps in
    reverse, and grad_accum += grad_scale · f'(scale · values + shift) · (grad @ transposed weight). While the tile is
    in cache, `next_bottleneck` is computed too; its output may overwrite the values from which grad is computed.
    """
    args = carray(record, 1)[0]
    thread, threads = this_thread(args.openmp)
    first, last = partition(args.rows, thread, threads)
    conv, next_conv, zero = args.conv, args.next_bottleneck, args.zero
    stride, grad, activation = _backward_buffers(args.scratch, args.tile, conv.weight, thread, zero)
    batch_norm_grad_vectors(args.batch_norm, thread, threads, zero)
    pack_weight(conv.weight, thread, threads, zero)
    affine_vectors(conv.input, thread, threads, zero)
    clear_sums(conv.gradients, thread)
    if conv.grad_weight.result and first == last:
        clear_grad_weight(conv, thread, zero)
    if next_conv.output.data:
        pack_weight(next_conv.weight, thread, threads, zero)
        affine_vectors(next_conv.input, thread, threads, zero)
    barrier(args.openmp)
    for start in range(first, last, args.tile):
        stop = min(start + args.tile, last)
        _fill_grad(args, start, stop, grad, stride)
        if conv.grad_weight.result:
            _fill_activation(args, thread, start, stop, activation)
            add_grad_weight(conv, thread, args.tile, stop - start, activation, grad, stride, start == first, zero)
        grad_stride = grad_activation(conv.weight, stop - start, grad, stride, activation, zero)
        accumulate_grad(args, thread, start, stop, activation, grad_stride, zero)
        if next_conv.output.data:
            affine_activation(next_conv.input, start, stop, activation, next_conv.weight.operand, zero)
            conv1x1_product(next_conv, start, stop, activation, grad, zero)
    barrier(args.openmp)
    reduce_sums(conv.gradients, thread, threads, zero)
    if conv.grad_weight.result:
        reduce_grad_weight(conv, thread, threads, zero)


@compiled
def _fill_grad(args, start, stop, grad, stride):
    """grad of rows start to stop, as operands: im2col of grad_output where there are several taps, the grad_input of
    the batch norm after the convolution where there is one, otherwise grad_output."""
    weight, zero = args.conv.weight, args.zero
    width, operand = weight.out_channels, weight.operand
    if weight.taps > 1:
        im2col(args.images, args.dilation, args.grad_output, width, start, stop, grad, stride, operand, zero)
        return
    if args.batch_norm.values.data:
        batch_norm_grad_rows(args.batch_norm, start, stop, grad, stride, operand, zero)
    else:
        for row in range(start, stop):
            source = offset(args.grad_output.data, row * width, args.grad_output.element)
            convert(source, args.grad_output.element, offset(grad, (row - start) * stride, operand), operand, width)
    pad_cells(grad, stop - start, stride, width, operand, zero)


@compiled
def _fill_activation(args, thread, start, stop, activation):
    """The operands of output rows start to stop: f(scale · values + shift), pooled or not."""
    input, operand, zero = args.conv.input, args.conv.weight.operand, args.zero
    if args.window > 1:
        sums = _row_buffer(args.scratch, thread, input.channels, zero)
        pooled_affine_activation(input, args.images, args.window, start, stop, activation, sums, operand, zero)
    else:
        affine_activation(input, start, stop, activation, operand, zero)


@compiled
def _backward_buffers(scratch, tile, weight, thread, zero):
    """The row stride (in operands) and the address of a tile's gradient (rows, taps · out_channels), and the address of
    its activation."""
    columns, operand = weight_columns(weight, zero), weight.operand
    grad = offset(scratch.data, thread * scratch.thread_stride, zero)
    return stride_of(columns, operand), grad, offset(grad, tile * buffer_stride_of(columns, operand, zero), zero)


@compiled
def _product_buffer(activation, tile, weight):
    """The address after a tile's activation (rows, in_channels)."""
    return offset(activation, tile * stride_of(weight.in_channels, weight.operand), weight.operand)


@compiled
def _row_buffer(scratch, thread, count, zero):
    """The last elements of the thread's scratch."""
    return offset(scratch.data, (thread + 1) * scratch.thread_stride - count, zero)


ALL = (*(conv_backward, conv1x1_forward, conv3x3_forward, batch_statistics, affine_backward, batch_norm_grad_input),)
"""All kernels. Those that take the longest to compile come first."""
