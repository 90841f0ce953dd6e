"""The memory of a step, known from its tensors' sizes: the step runs on the meta device, where nothing is computed.

A dispatch mode sees every operation, and when the storage of each result is freed.
"""

import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._tensors import CHANNELS_LAST, formatted, memory_format_of
from .._torch_private import memory_key, onednn_supports, run_cpu_implementation, run_parts
from ..kernels.convolution import SINGLE_IMAGE

CUDA_ALLOCATION = 512
"""PyTorch's allocator for CUDA rounds sizes up to a multiple of this."""

_aten = torch.ops.aten
_ELEMENTWISE = {_aten.mul, _aten.mul_, _aten.add, _aten.add_, _aten.sub, _aten.sub_}
_ELEMENTWISE |= {_aten.div, _aten.addcmul, _aten.addcmul_}
_CONVOLUTIONS = {_aten.convolution, _aten.convolution_backward}


class MemoryMode(TorchDispatchMode):
    """Follows the memory of all operations. An operator of this package runs its implementation rather than its fake
    one, so that the mode sees what is in it. The part of the model that runs is the one whose parameter an operation
    has had last.

    Args:
        device_type: the device for which the meta device stands, "cpu" or "cuda".
        held: the tensors from before the step.
        parts: the name of the part of the model for some of these, its parameters.

    Attributes:
        saved: the bytes that live between the forward and the backward.
        saved_by_part: those that each part of the model has allocated.
        peaks: the most bytes that all tensors held while each part ran, above those from before the step.
        pixels: on how many pixels stages of the shared engine have used a parameter, by its `memory_key`.
    """

    def __init__(self, device_type: str, held: Iterable[Tensor], parts: Mapping[Tensor, str]) -> None:
        super().__init__()
        self.device_type, self.is_backward = device_type, False
        self.held = list(held)  # keeps their storages alive, so that no other gets their addresses
        self.known = {memory_key(tensor) for tensor in self.held}
        self.parts = {memory_key(tensor): part for tensor, part in parts.items()}
        self.part = next(iter(parts.values()), "")
        self.saved_by_part, self.peaks = dict.fromkeys(parts.values(), 0), dict.fromkeys(parts.values(), 0)
        self.current, self.saved, self.pixels = 0, 0, Counter[int]()

    @property
    def peak(self) -> int:
        return max(self.peaks.values(), default=0)

    def has_run(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Called after each operation of PyTorch, for what else a subclass counts."""

    def start_backward(self) -> None:
        self.is_backward, self.saved = True, self.current

    def _see(self, args: Iterable[Any]) -> None:
        self.part = next(filter(None, (self.parts.get(memory_key(tensor)) for tensor in tensors_of(args))), self.part)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "efficient_densenet":
            self._see(args)  # a stage allocates its features before it uses a parameter
            if func.overloadpacket.__name__ == "stage" and not self.is_backward:
                pixels = args[0].numel() // args[0].shape[1]
                self.pixels.update({memory_key(tensor): pixels for tensor in tensors_of(args[1])})
            with self:
                return run_cpu_implementation(func, args, kwargs)
        with self:
            output = run_parts(func, args, kwargs)
        if output is not NotImplemented:
            return output
        output = _batch_norm_results(func.overloadpacket, args)
        if output is NotImplemented:
            output = func(*args, **kwargs)
        self._see(args)
        output = _in_device_format(func.overloadpacket, args, output)
        self.has_run(func, args, kwargs, output)
        for tensor in tensors_of(output):
            is_on_device = tensor.is_meta or (tensor.is_cpu and self.device_type == "cpu")
            if not is_on_device or (address := memory_key(tensor)) in self.known:
                continue
            storage = tensor.untyped_storage()
            size, part = storage.nbytes(), None if self.is_backward else self.part
            if self.device_type == "cuda":
                size = -(-size // CUDA_ALLOCATION) * CUDA_ALLOCATION
            self.known.add(address)
            self.current += size
            if part is not None:
                self.saved_by_part[part] = self.saved_by_part.get(part, 0) + size
            weakref.finalize(storage, self._remove, address, size, part).atexit = False
        temporary = _temporary_bytes(func.overloadpacket, args, output) if self.device_type == "cpu" else 0
        self.peaks[self.part] = max(self.peaks.get(self.part, 0), self.current + temporary)
        return output

    def _remove(self, address: int, size: int, part: str | None) -> None:
        self.known.discard(address)
        self.current -= size
        if part is not None and not self.is_backward:
            self.saved_by_part[part] -= size


def _temporary_bytes(operation: Any, args: tuple[Any, ...], output: Any) -> int:
    """The bytes that an operation on a CPU allocates and frees itself."""
    if operation in _CONVOLUTIONS:
        return _convolution_workspace(operation is _aten.convolution_backward, args, output)
    if operation in _ELEMENTWISE:  # copies of operands, and of the output, in the dtype of the arithmetic
        tensors = [each for each in (*tensors_of(args), output) if each.dim() > 0]
        common = functools.reduce(torch.promote_types, (each.dtype for each in tensors[:-1]), output.dtype)
        return sum(each.numel() for each in tensors if each.dtype is not common) * common.itemsize
    return 0


def _convolution_workspace(is_backward: bool, args: tuple[Any, ...], output: Any) -> int:
    """The bytes of a convolution's workspace: the columns of im2col or, about, its operands in oneDNN's memory format,
    which in half precision holds grad_input in float32."""
    grad_output, images, weight = args[:3] if is_backward else (output, *args[:2])
    _, in_channels, *kernel_size = weight.shape
    if _by_im2col(images, weight):
        taps, is_dilated = math.prod(kernel_size), max(args[5 + is_backward]) > 1
        columns = grad_output.numel() // grad_output.shape[1] * in_channels * taps * weight.itemsize
        return 0 if taps == 1 and weight.dim() < 5 else columns // (len(images) if is_dilated else 1)
    contiguous = (each for each in (images, grad_output) if memory_format_of(each) is torch.contiguous_format)
    blocked = sum(each.nbytes for each in contiguous) + weight.nbytes
    is_narrow = is_backward and weight.itemsize == 2 and output[0] is not None
    return max(blocked, 2 * images.nbytes) if is_narrow else blocked


def _by_im2col(images: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch convolves by im2col: without oneDNN, and in float32 one small image, unless the last two sides of
    the weight are above 3 (a signal is an image of one row), and few images by a single thread with a 1×1 weight."""
    if not onednn_supports(weight.dtype):
        return True
    height, width = [1, *weight.shape[2:]][-2:]
    is_small = images.shape[:4].numel() <= SINGLE_IMAGE and len(images) == 1 and min(height, width) <= 3
    is_pointwise = weight[0, 0].numel() == 1
    return weight.dtype is torch.float32 and (
        is_small or (is_pointwise and len(images) < 16 and torch.get_num_threads() == 1)
    )


def _batch_norm_results(operation: Any, args: tuple[Any, ...]) -> Any:
    """The results of a batch norm in training or of its backward on the meta device; otherwise NotImplemented.

    PyTorch computes them there by dozens of operations in Python, which took two thirds of the time of a plain step.
    """
    if operation is _aten.native_batch_norm and args[0].is_meta and args[5]:
        x = args[0]
        statistics = x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        return torch.empty_like(x), statistics, torch.empty_like(statistics)
    if operation is _aten.native_batch_norm_backward and args[0].is_meta:
        x, weight = args[1], args[1].new_empty(args[1].shape[1]) if args[2] is None else args[2]
        return [
            torch.empty_like(each) if needed else None
            for each, needed in zip((x, weight, weight), args[-1], strict=True)
        ]
    return NotImplemented


def _in_device_format(operation: Any, args: tuple[Any, ...], output: Any) -> Any:
    """The results of a convolution or its backward, in channels_last if images or weight are. On the meta device the
    forward's are contiguous in PyTorch 2.14, the backward's in 2.9."""
    if operation not in _CONVOLUTIONS:
        return output
    operands = args[:2] if operation is _aten.convolution else args[1:3]
    found = next((format for format in map(memory_format_of, operands) if format in CHANNELS_LAST.values()), None)
    if isinstance(output, Tensor):
        return formatted(output, found)
    grad_input, grad_weight, grad_bias = output
    return *(None if grad is None else formatted(grad, found) for grad in (grad_input, grad_weight)), grad_bias


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_of(value)
