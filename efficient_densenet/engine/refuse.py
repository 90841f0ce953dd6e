"""The limits of the shared engine: pure functions that return the reason why it cannot run modules, or None."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .._dimensions import DIMENSIONS, classes
from .._tensors import autocast_enabled, compute_dtype
from .._torch_private import has_torch_dispatch
from ..norms.batch_norm import torch_class
from ..norms.frozen import eps_of, is_frozen_batch_norm, uses_running_statistics
from ..norms.sync_batch_norm import SyncGroup, sync_group
from .changed_modules import must_be_called, why_not_module
from .parts import (
    BlockParts,
    ConsumerParts,
    LayerParts,
    NoPartsError,
    Norm,
    consumer_parts,
    is_activation,
    is_norm,
    parts_of,
)
from .sharded import can_run_inside, casts_parameters, why_sharded

_HALF_DTYPES = (torch.float16, torch.bfloat16)


class PartsOrReason(NamedTuple):
    """The parts of a block that the shared engine can run, or else the reason why it cannot."""

    parts: BlockParts | None
    reason: str | None


def shared_parts(block: nn.Module, x: Tensor) -> PartsOrReason:
    """The parts with which the shared engine can run `block` on `x`."""
    try:
        parts = parts_of(block)
    except NoPartsError as reason:
        return PartsOrReason(None, str(*reason.args))  # PyTorch 2.11 does not compile str(reason)
    hooked = [layer.module for layer in parts.layers if layer.module._forward_pre_hooks]
    sharded = tuple(each for each in hooked if each is not block and can_run_inside(each, x))
    reason = _why_not_layers(parts.layers, x, sharded, casts_parameters((block, *sharded), x))
    if reason is not None:
        return PartsOrReason(None, reason)
    return PartsOrReason(replace(parts, sharded=sharded) if sharded else parts, None)


def _why_not_layers(
    layers: tuple[LayerParts, ...], x: Tensor, sharded: Collection[nn.Module], casts: bool
) -> str | None:
    if not layers:
        return "found a block without layers"
    dims = x.dim() - 2
    if dims not in DIMENSIONS:
        return f"found an input of {x.dim()} dimensions, where the shared engine takes 3 to 5"
    last = layers[0].last_conv
    if type(last) in classes("Conv") and _dims(last) != dims:
        return f"found an input of {x.dim()} dimensions, where the block takes {_dims(last) + 2}"
    for layer in layers:
        reason = _why_not_layer(layer, dims, sharded)
        if reason is not None:
            return reason
    units = [(layer.norms, layer.convolutions) for layer in layers]
    return why_not_precision(units, x, casts) or _why_not_norms(layers, x)


def _why_not_layer(layer: LayerParts, dims: int, sharded: Collection[nn.Module]) -> str | None:
    for module in layer.module.modules():
        reason = why_not_module(module, sharded)
        if reason is not None:
            return reason
    for norm in layer.norms:
        if not _is_norm_of(norm, dims):
            return _wrong_class(norm, DIMENSIONS[dims].BatchNorm)
    for activation in layer.activations:
        reason = _why_not_activation(activation)
        if reason is not None:
            return reason
    for conv in layer.convolutions:
        if type(conv) is not DIMENSIONS[dims].Conv:
            return _wrong_class(conv, DIMENSIONS[dims].Conv)
    for conv, size in zip(layer.convolutions, (1, 3)[-len(layer.convolutions) :], strict=True):
        reason = _unusual_setting(conv, size)
        if reason is not None:
            return reason
    for norm in layer.norms:
        reason = _missing_tensors(norm)
        if reason is not None:
            return reason
    return None


def _why_not_activation(activation: nn.Module) -> str | None:
    if is_activation(activation):
        return None
    cls = type(activation)
    name = cls.__name__ if cls.__module__.startswith("torch.") else f"{cls.__module__}.{cls.__name__}"
    if any(True for _ in activation.parameters()):
        return f"found a {name} inside a layer, where the shared engine takes activations without weights"
    return f"found a {name} inside a layer, which is no activation of the shared engine"


def _wrong_class(module: nn.Module, usual: Any) -> str:
    # Name torch's class: a recomputation replaces it by ours, whose name would make the same warning appear again.
    name = torch_class(module).__name__
    return why_sharded(module) or f"found a {name} inside a layer, where the shared engine takes {usual.__name__}"


def _why_not_norms(layers: tuple[LayerParts, ...], x: Tensor) -> str | None:
    """The norms that read the features share their batch statistics, so they must agree."""
    first = layers[0].norm1
    alike = _normalization(first)
    if any(_normalization(layer.norm1) != alike for layer in layers):
        return (
            "found norms in one block that disagree about training mode, eps or processes, but share their statistics"
        )
    norms_inside = [layer.norm2 for layer in layers if layer.norm2 is not None]
    joined = sync_group(first) is not None
    frozen = [uses_running_statistics(norm) for norm in (first, *norms_inside)]
    if any(sync_group(norm) != sync_group(first) for norm in norms_inside) or (joined and len(set(frozen)) > 1):
        return "found synchronized norms and other norms in one block"
    reasons = (_why_norm_raises(norm, x.shape[0] * x.shape[2:].numel()) for norm in (first, *norms_inside))
    for reason in reasons:
        if reason is not None:
            return reason
    return None


def _why_norm_raises(norm: Norm, count: int) -> str | None:
    """Why PyTorch's batch norm raises on `count` values per channel in this process, or None."""
    in_training, group = not uses_running_statistics(norm), sync_group(norm)
    if in_training and count == 1 and (group is None or group.size == 1):
        return "found a single value per channel, which has no variance"
    if eps_of(norm) < 0 or (in_training and eps_of(norm) == 0):
        return f"found a norm with eps={eps_of(norm)}, which is to be positive in training"
    return None


def why_not_precision(
    units: Sequence[tuple[Sequence[Norm], Sequence[_ConvNd]]], x: Tensor, casts: bool = False
) -> str | None:
    """`units` are the norms and the convolutions of a layer, a consumer or a stem.

    Features have the input's dtype, norms this dtype or float32, and convolutions autocast's dtype or the input's."""
    convolutions = compute_dtype(x)
    of_convolutions = {convolutions} | ({torch.float32} if autocast_enabled(x) and x.dtype != torch.float64 else set())
    of_norms = {x.dtype} | ({torch.float32} if x.dtype in _HALF_DTYPES else set())
    for norms, convs in units:
        for modules, allowed in ((norms, of_norms), (convs, of_convolutions)):
            for module in modules:
                weight, bias = module.weight, module.bias
                if casts and has_torch_dispatch(type(weight)):
                    continue  # sharded, and of the dtype of x when it is gathered
                if weight.dtype not in allowed or not (bias is None or bias.dtype in allowed):
                    return (
                        f"found {_dtype_names({tensor.dtype for tensor in _tensors(module)})} in a "
                        f"{type(module).__name__}, with an input of {_dtype_names({x.dtype})} and convolutions in "
                        f"{_dtype_names({convolutions})}, which the shared engine does not mix"
                    )
    usual = {torch.float32, torch.float64, *_HALF_DTYPES}
    if x.dtype not in usual or (x.dtype in _HALF_DTYPES and convolutions != x.dtype):
        return f"found an input of {_dtype_names({x.dtype})} and convolutions in {_dtype_names({convolutions})}"
    return None


def _dtype_names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def joined_consumer(block: BlockParts, consumer: nn.Module, sharded: Sequence[nn.Module] = ()) -> ConsumerParts | None:
    """The parts of `consumer`, such as a transition or a norm, where the shared engine can run it with a block that it
    runs; None where it has a hook, which may use the features that it reads. It may run inside of calls of `sharded`.
    """
    parts = None if block.new_features_only else consumer_parts(consumer)  # it reads fewer channels
    if parts is None or any(must_be_called(module) and module not in sharded for module in consumer.modules()):
        return None
    layer, norm, conv = block.layers[-1], parts.norm, parts.conv
    joins = (
        _can_share_consumer(parts, _dims(layer.last_conv))
        and normalize_alike(layer.norm1, norm)
        and norm.weight.dtype == layer.norm1.weight.dtype
        and len(norm.weight) == len(layer.norm1.weight) + len(layer.last_conv.weight)
        and (conv is None or all(tensor.dtype == layer.conv1.weight.dtype for tensor in _tensors(conv)))
    )
    return parts if joins else None


def separate_consumer(consumer: nn.Module, x: Tensor) -> ConsumerParts | None:
    """The parts of `consumer` where the shared engine can run it by itself on `x`, else None."""
    dims, parts = x.dim() - 2, consumer_parts(consumer)
    if parts is None or dims not in DIMENSIONS or not _can_share_consumer(parts, dims):
        return None
    if any(map(must_be_called, consumer.modules())):
        return None
    norm, convolutions = parts.norm, [] if parts.conv is None else [parts.conv]
    if _why_norm_raises(norm, x.shape[0] * x.shape[2:].numel()) is not None:
        return None  # the norm itself raises
    return parts if why_not_precision([([norm], convolutions)], x) is None else None


def _can_share_consumer(parts: ConsumerParts, dims: int) -> bool:
    """Whether the shared engine can run these modules, by their classes and settings."""
    norm, conv = parts.norm, parts.conv
    if not (_is_norm_of(norm, dims) and not _missing_tensors(norm)):
        return False
    if len(parts.activations) > 1 or not all(map(is_activation, parts.activations)):
        return False
    if conv is None:
        return not _may_widen(norm)
    return type(conv) is DIMENSIONS[dims].Conv and not _unusual_setting(conv, 1)


def can_share_stem(conv: Any, norm: Norm, activation: nn.Module, pool: Any, x: Tensor) -> bool:
    """Whether the stem engine can run these four modules on `x`."""
    dims = x.dim() - 2
    if dims not in DIMENSIONS:
        return False
    if (type(conv), type(pool)) != (DIMENSIONS[dims].Conv, DIMENSIONS[dims].MaxPool) or not is_activation(activation):
        return False
    if not (_is_norm_of(norm, dims) and not _missing_tensors(norm)) or _may_widen(norm):
        return False
    if any(map(must_be_called, (conv, norm, activation, pool))) or pool.return_indices:
        return False
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return False
    shape, biases = conv.weight.shape, [norm.bias, *_tensors(conv)[1:]]
    if len(shape) != x.dim() or shape[1] * conv.groups != x.shape[1] or any(each.shape != shape[:1] for each in biases):
        return False  # the convolution or the norm itself raises
    size = convolved_size(x.shape[2:], shape[2:], conv.stride, conv.padding, conv.dilation)
    if min(size) < 1:
        return False  # the convolution itself raises where it has no output pixel
    if _why_norm_raises(norm, x.shape[0] * size.numel()) is not None:
        return False  # the norm itself raises
    return why_not_precision([([norm], [conv])], x) is None


def convolved_size(size: Sequence[int], kernel_size: Sequence[int], *rest: Sequence[int]) -> torch.Size:
    """The spatial size of a convolution's output; `rest` are its stride, padding and dilation."""
    sides = zip(size, kernel_size, *rest, strict=True)
    return torch.Size(
        (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for side, kernel, stride, padding, dilation in sides
    )


def _dims(conv: _ConvNd) -> int:
    return len(conv.kernel_size)


def _unusual_setting(conv: _ConvNd, kernel_size: int) -> str | None:
    """A setting in which `conv` is not a DenseNet's convolution, which keeps the spatial size and may have a bias."""
    dims, dilation = _dims(conv), conv.dilation[0]
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


def _tensors(module: Any) -> list[Tensor]:
    """The weight and the bias of a norm or a convolution, without None."""
    weight, bias = module.weight, module.bias
    return [weight] if bias is None else [bias] if weight is None else [weight, bias]


def normalize_alike(first: Norm, other: Norm) -> bool:
    """Whether two norms normalize equal values to equal results, before their weights and biases."""
    return _normalization(first) == _normalization(other)


def _normalization(norm: Norm) -> tuple[bool, float, SyncGroup | None]:
    return uses_running_statistics(norm), eps_of(norm), sync_group(norm)


def _is_norm_of(norm: Norm, dims: int) -> bool:
    """Whether this is a norm of signals, images or volumes that the shared engine can run."""
    of_dims = isinstance(norm, (DIMENSIONS[dims].BatchNorm, nn.SyncBatchNorm))  # the second one is of any dimension
    return is_norm(norm) and (of_dims or (dims == 2 and is_frozen_batch_norm(norm)))


def _missing_tensors(norm: Norm) -> str | None:
    """A tensor that a norm lacks and the shared engine reads, as a reason; or None."""
    weight, bias = norm.weight, norm.bias
    if weight is None or bias is None:
        return f"found a {torch_class(norm).__name__} without weight and bias, which the shared engine needs"
    if uses_running_statistics(norm) and norm.running_mean is None:
        name = torch_class(norm).__name__
        return f"found a {name} in evaluation mode without running statistics, which the shared engine needs there"
    for each in (bias, norm.running_mean, norm.running_var):
        if each is not None and each.shape != weight.shape:
            name, shape = torch_class(norm).__name__, tuple(weight.shape)
            return f"found a {name} with a tensor of shape {tuple(each.shape)} beside a weight of shape {shape}"
    return None


def _may_widen(norm: Norm) -> bool:
    """Whether the output of `norm` may have a wider dtype than its input. Under autocast, a FrozenBatchNorm2d does so:
    it is ordinary arithmetic with float32 buffers."""
    return is_frozen_batch_norm(norm) and autocast_enabled(norm.weight)
