"""1×1 convolutions, which are products, and 3×3 convolutions (3 or 3×3×3 in other dimensions) with padding = dilation,
by PyTorch's operations; and PyTorch's setting for the precision of convolutions.

oneDNN is the fastest on a CPU for most sizes, but its calls take longer than the arithmetic on images of few pixels.
PyTorch's own im2col convolution is faster there: PyTorch chooses it for one small image, and this file for several
small images too. PyTorch also chooses its own for one small volume, for which it takes eight times as long as oneDNN:
this file asks for a convolution in two groups, halves of the input channels, and adds up their outputs.

Without AVX-512 oneDNN takes long for a weight's gradient from channels_last: four times as long as MKL's product for a
1×1 convolution, up to twice as long for a larger one. There MKL computes 1×1 convolutions, and the gradients of others.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dimensions import dimensions_of
from .._tensors import device_type
from .._torch_private import IM2COL, convolutions_in_tf32, im2col_conv3x3, im2col_conv3x3_backward, why_not
from .row_tiles import is_small

IM2COL_BYTES = 1 << 18
"""The largest im2col matrix of images that are too small for oneDNN."""

COLUMNS_BYTES = 1 << 23
"""The most memory of the columns of im2col of `grad_output`, for gradients by products."""

ONEDNN_PRODUCT = 1 << 22
"""The fewest multiplications of a product by oneDNN, whose calls take longer."""

ONEDNN_ROWS = 64
"""The fewest rows of a product by oneDNN, which copies the weight to a memory format of its own."""

ROWS_MULTIPLE = 16
"""The images into which the rows of a matrix are divided: PyTorch convolves fewer without oneDNN in a single thread."""

SINGLE_IMAGE = 20480
"""The most values of a single image, or channels · depth · height of a single volume, that PyTorch convolves without
oneDNN if it is in one group."""


def conv3x3(images: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """The convolution of images in channels_last."""
    if _are_signals_on_cpu(images):
        return conv3x3(images.unsqueeze(2), weight.unsqueeze(2), dilation).squeeze(2)
    if _by_im2col(images, dilation):
        return im2col_conv3x3(images, weight)
    conv, padding = dimensions_of(images).conv, _padding(weight, dilation)
    if _are_smaller_volumes(images, weight):
        images = images.clone(memory_format=torch.contiguous_format)
    if _is_convolved_in_groups(images):
        return torch.add(*conv(images, _in_groups(weight), None, 1, padding, dilation, groups=2).chunk(2, 1))
    return conv(images, weight, padding=padding, dilation=dilation)


def conv3x3_gradients(
    grad_output: Tensor, images: Tensor, weight: Tensor, dilation: int, needs_grad_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_input, and grad_weight where it is needed."""
    if _has_two_slices_in_bfloat16(images):
        tensors = grad_output.float(), images.float(), weight.float()
        grad_input, grad_weight = conv3x3_gradients(*tensors, dilation, needs_grad_weight)
        return grad_input.to(images.dtype), None if grad_weight is None else grad_weight.to(images.dtype)
    if _are_signals_on_cpu(images):
        tensors = grad_output.unsqueeze(2), images.unsqueeze(2), weight.unsqueeze(2)
        grad_input, grad_weight = conv3x3_gradients(*tensors, dilation, needs_grad_weight)
        return grad_input.squeeze(2), None if grad_weight is None else grad_weight.squeeze(2)
    if _by_im2col(images, dilation):
        weight = weight.contiguous(memory_format=torch.channels_last)
        mask = [True, needs_grad_weight, False]
        grad_input, grad_weight, _ = im2col_conv3x3_backward(grad_output, images, weight, mask)
        return grad_input, grad_weight if needs_grad_weight else None
    if _has_gradients_by_products(grad_output, images, weight):
        return _gradients_by_products(grad_output, images, weight, dilation, needs_grad_weight)
    if _are_smaller_volumes(images, weight):
        grad_output, images = (each.clone(memory_format=torch.contiguous_format) for each in (grad_output, images))
    if _is_convolved_in_groups(images):
        tensors = torch.cat([grad_output, grad_output], 1), images, _in_groups(weight)
        grad_input, grad_weight = gradients(*tensors, dilation, needs_grad_weight, groups=2)
        return grad_input, None if grad_weight is None else torch.cat(grad_weight.chunk(2), 1)
    return gradients(grad_output, images, weight, dilation, needs_grad_weight)


def _gradients_by_products(
    grad_output: Tensor, images: Tensor, weight: Tensor, dilation: int, needs_grad_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of a convolution by those of a product, whose output has the columns of im2col of `grad_output`:
    one for each tap and output channel."""
    (out_channels, in_channels, *taps), sides, dims = weight.shape, images.shape[2:], images.dim() - 2
    padding = [size for size in reversed(_padding(weight, dilation)) for _ in range(2)]
    columns = F.pad(grad_output.movedim(1, -1), (0, 0, *padding))
    for dim, side in enumerate(sides, 1):
        columns = columns.unfold(dim, side, dilation)  # the taps take the place of the pixels, which come last
    columns = columns.permute(0, *range(dims + 2, 2 * dims + 2), *range(1, dims + 2))
    columns = columns.reshape(-1, math.prod(taps) * out_channels)
    matrix = weight.flip(*range(2, dims + 2)).movedim((0, 1), (-2, -1)).reshape(-1, in_channels)
    grad_input, grad_weight = conv1x1_gradients(columns, _as_matrix(images), matrix, needs_grad_weight)
    grad_input = grad_input.view(-1, *sides, in_channels).movedim(-1, 1)
    if grad_weight is None:
        return grad_input, None
    grad_weight = grad_weight.view(*taps, out_channels, in_channels)
    return grad_input, grad_weight.flip(*range(dims)).movedim((-2, -1), (0, 1))


def gradients(
    grad_output: Tensor, images: Tensor, weight: Tensor, dilation: int, needs_grad_weight: bool, groups: int = 1
) -> tuple[Tensor, Tensor | None]:
    """The gradients of any convolution whose padding keeps the spatial size."""
    padding = _padding(weight, dilation)
    stride, output_padding, dilations = ([size] * len(padding) for size in (1, 0, dilation))
    mask = [True, needs_grad_weight, False]
    settings = None, stride, padding, dilations, False, output_padding, groups, mask
    grad_input, grad_weight, _ = torch.ops.aten.convolution_backward(grad_output, images, weight, *settings)
    return grad_input, grad_weight if needs_grad_weight else None


def multiply(matrix: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = matrix @ weight.T: a 1×1 convolution of the rows of pixels."""
    if _multiplies_by_onednn(matrix, weight):
        images = _as_images(matrix)
        out.copy_(_as_matrix(dimensions_of(images).conv(images, weight[:, :, None, None])))
    else:
        torch.mm(matrix, weight.t(), out=out)


def conv1x1_gradients(
    grad_output: Tensor, matrix: Tensor, weight: Tensor, needs_grad_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """grad_output @ weight, and grad_output.T @ matrix where it is needed."""
    if _multiplies_by_onednn(matrix, weight):
        images = _as_images(grad_output), _as_images(matrix)
        grad_input, grad_weight = gradients(*images, weight[:, :, None, None], 1, needs_grad_weight)
        return _as_matrix(grad_input), None if grad_weight is None else grad_weight.flatten(1)
    grad_weight = None
    if needs_grad_weight and is_small(matrix, matrix.dtype):
        grad_weight = torch.mm(grad_output.t(), matrix)
    elif needs_grad_weight:  # of many rows, a tall product is faster than a wide one
        grad_weight = torch.mm(matrix.t(), grad_output).t()
    return torch.mm(grad_output, weight), grad_weight


def _multiplies_by_onednn(matrix: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies: on processors with AVX-512 its convolutions take half the time of MKL's products if
    they are not Intel's, and as long if they are."""
    return (
        matrix.dtype is torch.float32
        and has_avx512()
        and device_type(matrix) == "cpu"
        and len(matrix) % ROWS_MULTIPLE == 0
        and len(matrix) >= ONEDNN_ROWS
        and len(matrix) * weight.numel() >= ONEDNN_PRODUCT
        and torch.backends.mkldnn.is_available()
    )


def has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _as_images(matrix: Tensor) -> Tensor:
    """(rows, channels) as images in channels_last."""
    return matrix.unflatten(0, (ROWS_MULTIPLE, -1, 1)).movedim(-1, 1)


def _as_matrix(images: Tensor) -> Tensor:
    return images.movedim(1, -1).flatten(0, -2)


def _padding(weight: Tensor, dilation: int) -> list[int]:
    """The padding that keeps the spatial size."""
    return [size // 2 * dilation for size in weight.shape[2:]]


def _are_signals_on_cpu(images: Tensor) -> bool:
    """Whether these are signals that oneDNN reads in place as images of one row: PyTorch would copy them to NCL."""
    return images.dim() == 3 and device_type(images) == "cpu"


def _by_im2col(images: Tensor, dilation: int) -> bool:
    im2col_bytes = 9 * images.numel() * images.itemsize
    return (
        im2col_bytes <= IM2COL_BYTES
        and (dilation, images.dim(), images.dtype) == (1, 4, torch.float32)  # others lack oneDNN or im2col
        and device_type(images) == "cpu"
        and why_not(IM2COL) is None
    )


def _has_gradients_by_products(grad_output: Tensor, images: Tensor, weight: Tensor) -> bool:
    columns_bytes = grad_output.numel() * weight[0, 0].numel() * images.itemsize
    is_float32_on_cpu = images.dtype is torch.float32 and device_type(images) == "cpu"
    return is_float32_on_cpu and not has_avx512() and columns_bytes <= COLUMNS_BYTES


def _are_smaller_volumes(images: Tensor, weight: Tensor) -> bool:
    """Whether these are volumes that take less time to copy to the weight's memory format than the weight to theirs, as
    PyTorch would."""
    of_volumes = images.dim() == 5 and images.dtype is torch.float32 and device_type(images) == "cpu"
    return of_volumes and images.numel() < weight.numel()


def _is_convolved_in_groups(images: Tensor) -> bool:
    """Whether PyTorch would convolve a volume without oneDNN, whose channels can be divided into two groups."""
    return (
        (images.dim(), len(images), images.dtype) == (5, 1, torch.float32)
        and device_type(images) == "cpu"
        and images.shape[:4].numel() <= SINGLE_IMAGE
        and images.shape[1] % 2 == 0
        and torch.backends.mkldnn.is_available()
    )


def _in_groups(weight: Tensor) -> Tensor:
    """(out_channels, in_channels, ...) as the weight of two groups, (2 · out_channels, in_channels / 2, ...)."""
    return torch.cat(weight.chunk(2, 1))


def _has_two_slices_in_bfloat16(images: Tensor) -> bool:
    """Whether these are volumes of depth 2, whose weight's gradient oneDNN 3.12 leaves unwritten in bfloat16."""
    has_two_slices = images.dim() == 5 and images.shape[2] == 2
    return has_two_slices and images.dtype is torch.bfloat16 and device_type(images) == "cpu"


def precision() -> str:
    """The precision of float32 products, by PyTorch's setting for convolutions: "tf32" or "ieee"."""
    return "tf32" if convolutions_in_tf32() else "ieee"
