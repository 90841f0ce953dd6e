"""Functions of PyTorch on the meta device, which convert and allocate what they do on a CPU or a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_IN_LOW_PRECISION = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "scaled_dot_product_attention"),
}
_IN_LOW_PRECISION_ON_GPU = {"prelu"}
_IN_FLOAT32 = {
    *("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd", "log_softmax", "softmax"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits"),
}
_IN_FLOAT32_ON_CPU = {"avg_pool3d", "max_pool3d", "max_pool3d_with_indices"}
_IN_WIDEST_DTYPE = {"cat", "concat", "concatenate", "stack"}
"""The names of the functions for which autocast converts arguments, as https://pytorch.org/docs/stable/amp.html lists
them, of those that a DenseNet and its loss may call."""

_COMPOSED_ON_META = {"silu", "mish"}
"""The activations whose backward PyTorch composes of several operations on the meta device, but not elsewhere."""


class MetaFunctions(TorchFunctionMode):
    """Converts arguments where `torch.autocast("cpu")` is enabled, as autocast does for `device_type`; PyTorch's own
    ignores the meta device. A weight's conversion is made once. Backwards of activations allocate one gradient."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type, self.conversions = device_type, dict[int, Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _COMPOSED_ON_META and len(args) == 1 and not any(kwargs.values()):
            return _Activation.apply(*args)
        dtype = self._dtype_for(name, args) if torch.is_autocast_enabled("cpu") else None
        if dtype is None:
            return func(*args, **kwargs)
        kwargs = {key: self._convert(value, dtype) for key, value in kwargs.items()}
        return func(*(self._convert(value, dtype) for value in args), **kwargs)

    def _dtype_for(self, name: str, args: Sequence[Any]) -> torch.dtype | None:
        if name in _IN_LOW_PRECISION or (name in _IN_LOW_PRECISION_ON_GPU and self.device_type == "cuda"):
            return torch.get_autocast_dtype("cpu")
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


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.empty_like(x)
