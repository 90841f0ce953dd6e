"""Autocast for tensors on the meta device, which PyTorch's own autocast ignores."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_IN_LOW_PRECISION = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "scaled_dot_product_attention"),
}
_IN_FLOAT32 = {
    *("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd", "log_softmax", "softmax"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits"),
}
_IN_FLOAT32_ON_CPU = {"avg_pool3d", "max_pool3d", "max_pool3d_with_indices"}
_IN_WIDEST_DTYPE = {"cat", "concat", "concatenate", "stack"}
"""The names of the functions for which autocast converts arguments, as https://pytorch.org/docs/stable/amp.html lists
them, of those that a DenseNet and its loss may call."""


@contextlib.contextmanager
def autocast_on_meta(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast to `dtype` as on a device of this type; None does nothing."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)  # `torch.autocast` would refuse "cuda" where there is no GPU
    torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


class MetaAutocast(TorchFunctionMode):
    """Converts arguments wherever autocast is enabled for `device_type`. A weight's conversion is made once."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type, self.conversions = device_type, dict[int, Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = self._dtype_for(getattr(func, "__name__", ""), args)
        if dtype is None:
            return func(*args, **kwargs or {})
        kwargs = {name: self._convert(value, dtype) for name, value in (kwargs or {}).items()}
        return func(*(self._convert(value, dtype) for value in args), **kwargs)

    def _dtype_for(self, name: str, args: Sequence[Any]) -> torch.dtype | None:
        if not torch.is_autocast_enabled(self.device_type):
            return None
        if name in _IN_LOW_PRECISION:
            return torch.get_autocast_dtype(self.device_type)
        if name in _IN_WIDEST_DTYPE and args:
            return max((each.dtype for each in args[0]), key=lambda dtype: dtype.itemsize)
        is_wide = name in _IN_FLOAT32 or (name in _IN_FLOAT32_ON_CPU and self.device_type == "cpu")
        return torch.float32 if is_wide else None

    def _convert(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._convert(each, dtype) for each in value)
        is_converted = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        if not is_converted or value.dtype is dtype:
            return value
        is_weight = value.is_leaf and value.requires_grad and dtype is not torch.float32
        if not (is_weight and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        if id(value) not in self.conversions:
            self.conversions[id(value)] = value.to(dtype)
        return self.conversions[id(value)]
