"""The limits of the shared engine: reasons why it cannot run modules, or None where it can.

The engine does not call the modules inside of a layer. So what other code has changed about them is a limit too: hooks,
methods set on a module, patches of torch's classes and functions, function modes, parametrizations.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import starmap
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.conv import _ConvNd

from .._compilers import constant_to_compilers
from .._dimensions import DIMENSIONS, classes, per_dimension
from .._tensors import autocast_enabled, compute_dtype
from .._torch_private import (
    functorch_is_active,
    has_global_module_hooks,
    has_torch_dispatch,
    name_of_function_mode,
    why_not_shared,
)
from ..kernels.activations import NAMES, TABLE
from ..norms.batch_norm import torch_class
from ..norms.frozen import eps_of, is_frozen_batch_norm, uses_running_statistics
from ..norms.sync_batch_norm import SyncGroup, sync_group
from .parts import BlockParts, ConsumerParts, LayerParts, Norm, consumer_parts, is_activation, is_norm
from .sharded import casts_parameters, why_sharded

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
METHODS = "forward", "_conv_forward", "_check_input_dim"
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def must_be_called(module: nn.Module) -> bool:
    """Whether `module` has hooks, or methods set on the instance, that run only if it is called."""
    attributes = module.__dict__
    return any(name in attributes for name in METHODS) or any(attributes[name] for name in HOOKS)


def why_not_parametrized(module: nn.Module) -> str | None:
    """Why a layer with this module inside cannot run by its parts, whose weights are parameters, or None."""
    name = type(module).__name__
    return f"found a parametrization of a {name} inside a layer" if "parametrizations" in module._modules else None


def why_not_global_changes() -> str | None:
    """A hook on all modules, a function mode, or a patch of one of torch's classes or functions, which the shared
    engine would not call; or what this PyTorch lacks."""
    if why_not_shared() is not None:
        return why_not_shared()
    if has_global_module_hooks():
        return "found a hook on all modules, which the shared engine does not call inside a layer"
    if function_mode() is not None:
        return f"found a {function_mode()}, a function mode, which would not see what the shared engine computes"
    name = patched_function()
    return None if name is None else f"found a new {name}, which the shared engine would not call"


function_mode = constant_to_compilers(name_of_function_mode)
"""Compilers trace a function mode by themselves."""

_CLASSES = (
    *(*NAMES, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(each for name in ("Conv", "BatchNorm", "AvgPool", "MaxPool") for each in classes(name)),
)
_IN_F = *TABLE, "batch_norm", *(f"{kind}{n}d" for kind in ("conv", "avg_pool", "max_pool") for n in (1, 2, 3))
_FUNCTIONS: list[tuple[Any, str]] = [
    *((cls, name) for cls in _CLASSES for name in METHODS if hasattr(cls, name)),
    *((F, name) for name in _IN_F if hasattr(F, name)),
    (torch, "cat"),
]


def _of_torch(function: Any) -> Any:
    """`function` if torch has defined it; None if other code has put it into torch's class or module."""
    is_builtin = isinstance(function, BuiltinFunctionType)
    module = function.__module__ if is_builtin else getattr(function, "__globals__", {}).get("__name__", "")
    return function if f"{module}.".startswith("torch.") else None


_TORCHS = [_of_torch(getattr(owner, name)) for owner, name in _FUNCTIONS]


@constant_to_compilers
def patched_function() -> str | None:
    """The name of a function that other code has replaced in a class or module of torch, such as
    "Conv2d._conv_forward" or "torch.cat"; None if there is none."""
    now = list(starmap(getattr, _FUNCTIONS))
    changed = () if now == _TORCHS else zip(_FUNCTIONS, now, _TORCHS, strict=True)
    return next((f"{owner.__name__}.{name}" for (owner, name), each, torchs in changed if each is not torchs), None)


def why_not_ordinary_autograd(x: Tensor) -> str | None:
    """Why autograd cannot recompute here, or None; compiled code has no transforms or forward-mode derivatives."""
    if torch.compiler.is_compiling():
        return None
    if functorch_is_active():
        return "found a torch.func transform (vmap, grad, …), but recomputation needs ordinary autograd"
    if forward_ad.unpack_dual(x).tangent is not None:
        return "found a forward-mode derivative, but recomputation needs reverse-mode autograd"
    return None


def why_not_layers(
    layers: Sequence[LayerParts], x: Tensor, sharded: Collection[nn.Module] = (), casts: bool = False
) -> str | None:
    """Why the layers of a block cannot run on x, inside of calls of `sharded`, which cast parameters if `casts`."""
    if not layers:
        return "found a block without layers"
    dims, first = x.dim() - 2, layers[0]
    if dims not in DIMENSIONS:
        return f"found an input of {x.dim()} dimensions, where the shared engine takes 3 to 5"
    if type(first.last_conv) in classes("Conv") and len(first.last_conv.kernel_size) != dims:
        found = len(first.last_conv.kernel_size) + 2
        return f"found an input of {x.dim()} dimensions, where the block takes {found}"
    for layer in layers:
        sizes = (1, 3)[-len(layer.convolutions) :]
        reason = _first(
            *(_why_not_inside(module, sharded) for module in layer.module.modules()),
            *(_why_not_norm(norm, dims) for norm in layer.norms),
            *map(_why_not_activation, layer.activations),
            *(why_not_conv(conv, dims, size) for conv, size in zip(layer.convolutions, sizes, strict=True)),
        )
        if reason is not None:
            return reason
    reason = why_not_precision([(layer.norms, layer.convolutions) for layer in layers], x, casts)
    if reason is not None:
        return reason
    if not all(normalize_alike(first.norm1, layer.norm1) for layer in layers):
        return (
            "found norms in one block that disagree about training mode, eps or processes, but share their statistics"
        )
    norms = [first.norm1, *(layer.norm2 for layer in layers if layer.norm2 is not None)]
    group, modes = sync_group(first.norm1), {uses_running_statistics(norm) for norm in norms}
    if any(sync_group(norm) != group for norm in norms) or (group is not None and len(modes) > 1):
        return "found synchronized norms and other norms in one block"
    return _first(*(_why_norm_raises(norm, x.shape[0] * x.shape[2:].numel()) for norm in norms))


def consumer_of(
    consumer: nn.Module, x: Tensor, block: BlockParts | None = None, sharded: Collection[nn.Module] = ()
) -> ConsumerParts | None:
    """The parts of `consumer`, such as a transition or a norm, where the shared engine can run it: by itself on x, or
    on the output of a `block` that it runs on x. None where it has a hook, which may use the features that it reads.
    It may run inside of calls of `sharded`.
    """
    dims, parts = x.dim() - 2, consumer_parts(consumer)
    if parts is None or dims not in DIMENSIONS or len(parts.activations) > 1:
        return None
    if any(must_be_called(module) and module not in sharded for module in consumer.modules()):
        return None
    norm, conv = parts.norm, parts.conv
    if block is not None and block.new_features_only:
        return None  # it reads fewer channels
    if norm is None:
        if block is None or x.dtype is not compute_dtype(x):  # it would need a copy of the features in another dtype
            return None
    elif _first(_why_not_norm(norm, dims), *map(_why_not_activation, parts.activations)) is not None:
        return None
    elif block is not None and not normalize_alike(block.layers[0].norm1, norm):
        return None  # it reads other statistics
    elif (conv is None and _may_widen(norm)) or _why_norm_raises(norm, x.shape[0] * x.shape[2:].numel()) is not None:
        return None
    if conv is not None and why_not_conv(conv, dims, 1) is not None:
        return None
    units = [([] if norm is None else [norm], [] if conv is None else [conv])]
    return parts if why_not_precision(units, x, casts_parameters(sharded, x)) is None else None


def can_share_stem(modules: Sequence[Any], x: Tensor) -> bool:
    """Whether the stem engine can run these four modules on `x`, and the modules themselves do not raise."""
    (conv, norm, activation, pool), dims = modules, x.dim() - 2
    if dims not in DIMENSIONS or any(map(must_be_called, modules)):
        return False
    if (type(conv), type(pool)) != (DIMENSIONS[dims].Conv, DIMENSIONS[dims].MaxPool) or pool.return_indices:
        return False
    if _first(_why_not_norm(norm, dims), _why_not_activation(activation)) is not None or _may_widen(norm):
        return False
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return False
    shape, biases = conv.weight.shape, [norm.bias, *([] if conv.bias is None else [conv.bias])]
    if len(shape) != x.dim() or shape[1] * conv.groups != x.shape[1] or any(each.shape != shape[:1] for each in biases):
        return False
    settings = (per_dimension(each, dims) for each in (conv.stride, conv.padding, conv.dilation))
    size = convolved_size(x.shape[2:], shape[2:], *settings)
    if min(size) < 1 or _why_norm_raises(norm, x.shape[0] * size.numel()) is not None:
        return False
    return why_not_precision([([norm], [conv])], x) is None


def convolved_size(size: Sequence[int], kernel_size: Sequence[int], *rest: Sequence[int]) -> torch.Size:
    """The spatial size of a convolution's output; `rest` are its stride, padding and dilation."""
    sides = zip(size, kernel_size, *rest, strict=True)
    return torch.Size(
        (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for side, kernel, stride, padding, dilation in sides
    )


def normalize_alike(first: Norm, other: Norm) -> bool:
    """Whether two norms normalize equal values to equal results, before their weights and biases."""
    return _normalization(first) == _normalization(other)


def why_not_precision(
    units: Iterable[tuple[Sequence[Norm], Sequence[_ConvNd]]], x: Tensor, casts: bool = False
) -> str | None:
    """Why the dtypes of `units`, the norms and convolutions of layers, a consumer or a stem, cannot run on x, or None.

    Features have the input's dtype, norms this dtype or float32, and convolutions autocast's dtype or the input's."""
    convolutions = compute_dtype(x)
    of_convolutions = {convolutions} | ({torch.float32} if autocast_enabled(x) and x.dtype != torch.float64 else set())
    of_norms = {x.dtype} | ({torch.float32} if x.dtype in _HALF_DTYPES else set())
    for norms, convs in units:
        for modules, allowed in ((norms, of_norms), (convs, of_convolutions)):
            for module in modules:
                if casts and has_torch_dispatch(type(module.weight)):
                    continue  # sharded, and of the dtype of x when it is gathered
                dtypes = {module.weight.dtype} if module.bias is None else {module.weight.dtype, module.bias.dtype}
                if not dtypes <= allowed:
                    return (
                        f"found {_dtype_names(dtypes)} in a {type(module).__name__}, with an input of "
                        f"{_dtype_names({x.dtype})} and convolutions in {_dtype_names({convolutions})}, which the "
                        "shared engine does not mix"
                    )
    usual = {torch.float32, torch.float64, *_HALF_DTYPES}
    if x.dtype not in usual or (x.dtype in _HALF_DTYPES and convolutions != x.dtype):
        return f"found an input of {_dtype_names({x.dtype})} and convolutions in {_dtype_names({convolutions})}"
    return None


def _dtype_names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _first(*reasons: str | None) -> str | None:
    """The first reason that is not None."""
    for reason in reasons:  # compilers of PyTorch 2.6 to 2.10 cannot trace `next` with a default
        if reason is not None:
            return reason
    return None


def _why_not_inside(module: nn.Module, sharded: Collection[nn.Module]) -> str | None:
    if must_be_called(module) and module not in sharded:
        name = type(module).__name__
        hooked = f"found a hook on, or a new forward of, a {name} inside a layer, which the engine would not call"
        return why_sharded(module) or hooked
    return why_not_parametrized(module)


def _why_not_norm(norm: Norm, dims: int) -> str | None:
    """Why a norm is not one for signals, images or volumes that the shared engine can run, or lacks tensors."""
    of_dims = isinstance(norm, (DIMENSIONS[dims].BatchNorm, nn.SyncBatchNorm))  # the second one is of any dimension
    if not (is_norm(norm) and (of_dims or (dims == 2 and is_frozen_batch_norm(norm)))):
        return _wrong_class(norm, DIMENSIONS[dims].BatchNorm)
    weight, others = norm.weight, (norm.bias, norm.running_mean, norm.running_var)
    if weight is None or norm.bias is None:
        found = "without weight and bias, which the shared engine needs"
    elif uses_running_statistics(norm) and norm.running_mean is None:
        found = "in evaluation mode without running statistics, which the shared engine needs there"
    elif any(each is not None and each.shape != weight.shape for each in others):
        found = f"with a tensor of another shape than its weight's {tuple(weight.shape)}"
    else:
        return None
    return f"found a {torch_class(norm).__name__} {found}"


def _why_norm_raises(norm: Norm, count: int) -> str | None:
    """Why PyTorch's batch norm raises on `count` values per channel in this process, or None."""
    in_training, group = not uses_running_statistics(norm), sync_group(norm)
    if in_training and count == 1 and (group is None or group.size == 1):
        return "found a single value per channel, which has no variance"
    if eps_of(norm) < 0 or (in_training and eps_of(norm) == 0):
        return f"found a norm with eps={eps_of(norm)}, which is to be positive in training"
    return None


def _why_not_activation(activation: nn.Module) -> str | None:
    if is_activation(activation):
        return None
    cls = type(activation)
    name = cls.__name__ if cls.__module__.startswith("torch.") else f"{cls.__module__}.{cls.__name__}"
    if any(True for _ in activation.parameters()):
        return f"found a {name} inside a layer, where the shared engine takes activations without weights"
    return f"found a {name} inside a layer, which is no activation of the shared engine"


def why_not_conv(conv: _ConvNd, dims: int, kernel_size: int) -> str | None:
    """Why `conv` is not a DenseNet's convolution, which keeps the spatial size and may have a bias."""
    if type(conv) is not DIMENSIONS[dims].Conv:
        return _wrong_class(conv, DIMENSIONS[dims].Conv)
    dilation = conv.dilation[0]
    sizes = tuple(conv.weight.shape[2:]), conv.padding, conv.dilation, conv.stride
    sizes = [tuple(each) if isinstance(each, list) else each for each in sizes]  # PyTorch takes lists too
    settings = {
        "kernel_size": (kernel_size,) * dims,
        "padding": (kernel_size // 2 * dilation,) * dims,
        "dilation": (dilation,) * dims,
        "stride": (1,) * dims,
        "groups": 1,
        "padding_mode": "zeros",
    }
    for (name, usual), found in zip(settings.items(), (*sizes, conv.groups, conv.padding_mode), strict=True):
        if found not in (usual, "same"):  # padding="same" is this padding for an odd kernel size
            where = f"in a {type(conv).__name__} of a layer"
            return f"found {name}={found!r} {where}, where the shared engine takes {usual!r}"
    return None


def _wrong_class(module: nn.Module, usual: Any) -> str:
    # Name torch's class: a recomputation replaces it by ours, whose name would make the same warning appear again.
    name = torch_class(module).__name__
    return why_sharded(module) or f"found a {name} inside a layer, where the shared engine takes {usual.__name__}"


def _normalization(norm: Norm) -> tuple[bool, float, SyncGroup | None]:
    return uses_running_statistics(norm), eps_of(norm), sync_group(norm)


def _may_widen(norm: Norm) -> bool:
    """Whether the output of `norm` may have a wider dtype than its input. Under autocast, a FrozenBatchNorm2d does so:
    it is ordinary arithmetic with float32 buffers."""
    return is_frozen_batch_norm(norm) and autocast_enabled(norm.weight)
