"""A training step traced on the meta device, as it would run on a GPU: with the Triton kernels, or with the portable
ones."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_devices import Device
from gpu_trace import StepTrace, TracingMode, launches_replaced, replaced_in_triton_modules, triton_modules
from settings import LAYOUTS, Setting, architecture
from torch import Tensor

from efficient_densenet import DenseNet
from efficient_densenet import kernels as kernel_sets

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def trace_step(
    setting: Setting, engine: str, kernels: str = "triton", device: Device | None = None, extra_layers: int = 0
) -> StepTrace:
    """The forward, the cross entropy and the backward of a step whose gradients are None before it.

    Args:
        kernels: the shared engine's, triton or portable.
        device: the GPU for whose limits the Triton kernels choose their tiles; None for those without a GPU.
        extra_layers: how many layers each block of the model has more.
    """
    if kernels == "triton" and importlib.util.find_spec("triton") is None:
        raise ValueError("found no Triton, whose kernels are to be counted: pip install triton")
    arguments: dict[str, Any] = architecture(setting.model)
    config = [num_layers + extra_layers for num_layers in arguments["block_config"]]
    with torch.device("meta"):
        network = DenseNet(**(arguments | {"block_config": tuple(config), "efficient": engine}))
        images = torch.empty(setting.batch_size, 3, setting.image_size, setting.image_size)
        labels = torch.empty(setting.batch_size, dtype=torch.long)
    memory_format: Any = LAYOUTS[setting.layout]
    network.to(memory_format=memory_format)
    images = images.contiguous(memory_format=memory_format)
    mode = TracingMode("meta", [*network.parameters(), *network.buffers(), images, labels])
    autocast = _AutocastOfMeta(AUTOCAST_DTYPES.get(setting.precision))
    with (
        tensor_float_32(setting.precision == "tf32"),
        kernels_chosen(triton=kernels == "triton"),
        _limits_of(device),
        launches_replaced(mode.add_launch),
        mode,
    ):
        with autocast.enabled():
            loss = F.cross_entropy(network(images), labels)
        mode.phase = "backward"
        loss.backward()
    return mode.trace


@contextlib.contextmanager
def kernels_chosen(triton: bool) -> Iterator[None]:
    """Within, the shared engine runs the Triton kernels, or else the portable ones, whatever the device."""

    def triton_supports(values: Tensor) -> bool:  # a mock would keep its arguments, and their memory
        return triton

    def numba_supports(values: Tensor) -> bool:
        return False

    with (
        mock.patch.object(kernel_sets, "triton_supports", triton_supports),
        mock.patch.object(kernel_sets, "numba_supports", numba_supports),
    ):
        yield


@contextlib.contextmanager
def _limits_of(device: Device | None) -> Iterator[None]:
    """Within, the Triton kernels choose their tiles for `device`, as far as they ask for a device's limits at all."""
    tiles: Any = next((module for module in triton_modules() if hasattr(module, "DeviceLimits")), None)
    if device is None or tiles is None:
        yield
        return
    of_multiprocessor, of_block = (kib * 1024 for kib in device.shared_memory)
    limits = tiles.DeviceLimits(
        multiprocessors=device.num_sms, shared_memory=of_multiprocessor, shared_memory_of_a_block=of_block
    )
    with replaced_in_triton_modules({"device_limits"}, lambda function: lambda of_device: limits):
        yield


@contextlib.contextmanager
def tensor_float_32(allowed: bool) -> Iterator[None]:
    """Within, products of float32 are computed in TF32, or else exactly."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


class _AutocastOfMeta:
    """An autocast for the meta device, which has none: the queries answer as they would on CUDA, and the functions of a
    DenseNet that autocast changes get their operands in the dtype that they have there."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.requested, self.dtype = dtype, None

    @contextlib.contextmanager
    def enabled(self) -> Iterator[None]:
        """Within, autocast is on, unless no dtype was requested."""
        if self.requested is None:
            yield
            return
        with (
            self._set(self.requested),
            mock.patch.object(torch.amp, "is_autocast_available", self._is_available),
            mock.patch.object(torch, "is_autocast_enabled", self._is_enabled),
            mock.patch.object(torch, "get_autocast_dtype", self._get_dtype),
            mock.patch.object(torch, "autocast", self._disabled),
            mock.patch.object(F, "conv2d", self._casting(F.conv2d)),
            mock.patch.object(F, "linear", self._casting(F.linear)),
            mock.patch.object(F, "cross_entropy", self._casting(F.cross_entropy, torch.float32)),
        ):
            yield

    @contextlib.contextmanager
    def _set(self, dtype: torch.dtype | None) -> Iterator[None]:
        before, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = before

    def _is_available(self, device_type: str) -> bool:
        return True

    def _is_enabled(self, device_type: str) -> bool:
        return self.dtype is not None

    def _get_dtype(self, device_type: str) -> torch.dtype | None:
        return self.dtype

    def _disabled(self, device_type: str, enabled: bool) -> contextlib.AbstractContextManager:
        """In the place of `torch.autocast`, which the engines use to turn it off."""
        assert not enabled
        return self._set(None)

    def _casting(self, function: Callable[..., Tensor], always: torch.dtype | None = None) -> Callable[..., Tensor]:
        """`function` with its floating-point tensors in autocast's dtype, or in `always`."""

        @functools.wraps(function)
        def cast(*arguments: Any, **options: Any) -> Tensor:
            dtype = self.dtype and (always or self.dtype)
            if dtype is not None:
                arguments = tuple(each.to(dtype) if _is_floating(each) else each for each in arguments)
            return function(*arguments, **options)

        return cast


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
