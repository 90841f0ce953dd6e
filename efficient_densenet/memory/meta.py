"""What stands on the meta device for a model, an optimizer and functions of PyTorch: their tensors have no data."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .._torch_private import hook_dicts, is_distributed_wrapper, sharding_of
from .trace import tensors_of

OptimizerLike = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}

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
"""The activations whose backward PyTorch composes of several operations on the meta device, but not elsewhere. GELU
allocates there what they do elsewhere."""


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy that allocates no data and calls none of the modules' hooks, in training mode if no module is.

    Its modules have the forwards of their classes: one that was set on a module may belong to the original.
    """
    model = unwrapped(model)
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, tensors)):
        raise ValueError("found parameters without a size: run the model once on an input, then ask for its memory")
    if any(sharding_of(module) for module in model.modules()):
        raise ValueError(
            "found parameters that are sharded among processes: ask for the model's memory before it is sharded"
        )
    # Modules may have tensors as ordinary attributes too.
    tensors += [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    memo = dict[int, Any]()
    for tensor in tensors:
        data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
    for module in model.modules():
        for hooks in hook_dicts(module):
            memo[id(hooks)] = OrderedDict.fromkeys(hooks, lambda *_, **__: None)
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        forward = vars(module).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not module:
            del module.forward
    return copied if any(module.training for module in copied.modules()) else copied.train()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside PyTorch's wrappers for compilation and data parallelism."""
    while hasattr(model, "_orig_mod") or (is_distributed_wrapper(model) and hasattr(model, "module")):
        inside: Any = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        model = inside
    return model


def optimizer_state(model: nn.Module, meta_model: nn.Module, optimizer: OptimizerLike) -> list[Tensor]:
    """The tensors of the optimizer's state: those that it has, or what a step on the meta device makes."""
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        made = optimizer
        if not optimizer.state:  # a copy that trains the copies of the parameters
            of_copy = dict(zip(map(id, model.parameters()), meta_model.parameters(), strict=True))
            not_on_meta = {key: False for key in ("fused", "foreach", "capturable") if key in optimizer.defaults}
            made = copy.copy(optimizer)
            made.state = defaultdict(dict)
            made.param_groups = [
                group | not_on_meta | {"params": [of_copy[id(p)] for p in group["params"] if id(p) in of_copy]}
                for group in optimizer.param_groups
            ]
            if not any(group["params"] for group in made.param_groups):
                raise ValueError(f"found a {type(optimizer).__name__} that trains no parameter of this model")
    else:
        if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {optimizer!r}, but must be one of {', '.join(OPTIMIZERS)}, or an optimizer")
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        made = make([p for p in meta_model.parameters() if p.requires_grad])
    if not made.state:
        try:
            made.step()
        except Exception as error:  # of an optimizer that needs data, a closure or a certain device
            raise ValueError(
                f"found a {type(made).__name__}, whose state is not known before its first step ({error}): give the "
                "optimizer after a step, or another one"
            ) from error
    tensors = [value for state in made.state.values() for value in tensors_of([*state.values()]) if value.dim() > 0]
    return [torch.empty_like(value, device="meta") for value in tensors]


class MetaFunctions(TorchFunctionMode):
    """Converts arguments where `torch.autocast("cpu")` is enabled, as autocast does for `device_type`; PyTorch's own
    ignores the meta device. A weight's conversion is made once. Backwards of activations allocate one gradient."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type, self.conversions = device_type, dict[int, Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _COMPOSED_ON_META and len(args) == 1 and not any(kwargs.values()):
            return F.gelu(*args)
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
