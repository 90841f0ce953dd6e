"""What the shared engine can take."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .._torch_private import hooks_watch_all_modules
from ..checkpoint.parameters import parameters_of
from ..norms.batch_norm import torch_class
from ..norms.sync_batch_norm import sync_group
from .parts import LayerParts, NoPartsError, consumer_parts, is_norm, parts_of

_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_MAX_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
_HALVES = (torch.float16, torch.bfloat16)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_not_shared(block: nn.Module, x: Tensor) -> str | None:
    """Why the shared engine cannot run `block` on `x`, or None where it can."""
    if hooks_watch_all_modules():
        return "found a hook on all modules, and those inside a layer are not called"
    try:
        layers = parts_of(block).layers
    except NoPartsError as reason:
        return str(reason)
    return _why_not_layers(layers, x)


def _why_not_layers(layers: tuple[LayerParts, ...], x: Tensor) -> str | None:
    if not layers:
        return "found a block without layers"
    dims = x.dim() - 2
    if dims not in _CONVOLUTIONS:
        return f"found an input of {x.dim()} dimensions, where the shared engine takes 3 to 5"
    last = layers[0].last_conv
    if type(last) in _CONVOLUTIONS.values() and _dims(last) != dims:
        return f"found an input of {x.dim()} dimensions, where the block takes {_dims(last) + 2}"
    for layer in layers:
        reason = _why_not_layer(layer, dims)
        if reason is not None:
            return reason
    return _why_not_widths(layers, x) or _why_not_precision(layers, x) or _why_not_norms(layers, x)


def _why_not_layer(layer: LayerParts, dims: int) -> str | None:
    for module in layer.module.modules():
        if is_watched(module):
            return f"found a hook on, or a new forward of, a {type(module).__name__} inside a layer, which it passes by"
        if "parametrizations" in module._modules:
            return f"found a parametrization of a {type(module).__name__} inside a layer"
    for norm in layer.norms:
        if not (is_norm(norm) and isinstance(norm, _NORMS[dims])):
            return _other(norm, _NORMS[dims])
    for activation in layer.activations:
        if type(activation) is not nn.ReLU:
            return _other(activation, nn.ReLU)
    for conv in layer.convolutions:
        if type(conv) is not _CONVOLUTIONS[dims]:
            return _other(conv, _CONVOLUTIONS[dims])
    kernels = zip(layer.convolutions[::-1], (3, 1), strict=False)
    if not all(_is_usual(conv, kernel) for conv, kernel in kernels) or not all(map(_has_values, layer.norms)):
        return "found a layer that is not batch norm, ReLU and convolution in turn, all of the usual kind"
    return None


def _other(module: nn.Module, usual: type[nn.Module]) -> str:
    # By its name before it ever was recomputed, or there would be a second warning.
    found = torch_class(module).__name__
    return f"found a {found} inside a layer, where the shared engine takes {usual.__name__}"


def _why_not_widths(layers: tuple[LayerParts, ...], x: Tensor) -> str | None:
    """Each layer reads all there is, and adds as much as the others."""
    growth_rate = layers[0].last_conv.out_channels
    for i, layer in enumerate(layers):
        expected, read, made = x.shape[1] + i * growth_rate, layer.norm1.num_features, layer.last_conv.out_channels
        if read != expected or made != growth_rate:
            return (
                f"found a layer from {read} channels to {made}, where the shared engine takes one from {expected} to "
                f"{growth_rate}"
            )
        if layer.norm2 is not None and layer.norm2.num_features != layer.conv1.out_channels:
            return f"found a norm of {layer.norm2.num_features} channels after {layer.conv1.out_channels}"
    return None


def _why_not_norms(layers: tuple[LayerParts, ...], x: Tensor) -> str | None:
    """The norms that read the features share their statistics."""
    first = layers[0].norm1
    if not all(agree(first, layer.norm1) for layer in layers):
        return (
            "found norms in one block that disagree about training mode, eps or processes, but share their statistics"
        )
    inside = [layer.norm2 for layer in layers if layer.norm2 is not None]
    joined = sync_group(first) is not None
    if any(sync_group(norm) != sync_group(first) or (joined and norm.training != first.training) for norm in inside):
        return "found synchronised norms beside others in one block"
    if not joined and any(norm.training for norm in (first, *inside)) and x.shape[0] * x.shape[2:].numel() == 1:
        return "found a single value per channel, of which there is no variance"
    return None


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision of convolutions of `x`: autocast's, which leaves float64 alone, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if _casts(x) and x.dtype != torch.float64 else x.dtype


def _why_not_precision(layers: tuple[LayerParts, ...], x: Tensor) -> str | None:
    """Features have their input's precision, norms that or float32, and convolutions autocast's or their input's."""
    convolutions = compute_dtype(x)
    of_convolutions = {convolutions} | ({torch.float32} if _casts(x) and x.dtype != torch.float64 else set())
    of_norms = {x.dtype} | ({torch.float32} if x.dtype in _HALVES else set())
    for layer in layers:
        for modules, allowed in ((layer.norms, of_norms), (layer.convolutions, of_convolutions)):
            for module in modules:
                found = {tensor.dtype for tensor in parameters_of(module)}
                if not found <= allowed:
                    return (
                        f"found {_names(found)} in a {type(module).__name__}, with an input of {_names({x.dtype})} and "
                        f"convolutions in {_names({convolutions})}, which the shared engine does not mix"
                    )
    usual = {torch.float32, torch.float64, *_HALVES}
    if x.dtype not in usual or (x.dtype in _HALVES and convolutions != x.dtype):
        return f"found an input of {_names({x.dtype})} and convolutions in {_names({convolutions})}"
    return None


def _casts(x: Tensor) -> bool:
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def can_consume(block: nn.Module, consumer: nn.Module) -> bool:
    """Whether the shared engine can run `consumer`, such as a transition or a norm, with a block that it runs.

    Where a hook watches it, the features that it reads must exist.
    """
    parts = consumer_parts(consumer)
    if parts is None or any(map(is_watched, consumer.modules())):
        return False
    layer, norm, conv = parts_of(block).layers[-1], parts.norm, parts.conv
    if not (is_norm(norm) and isinstance(norm, _NORMS[_dims(layer.last_conv)]) and _has_values(norm)):
        return False
    if not agree(layer.norm1, norm) or norm.weight.dtype != layer.norm1.weight.dtype:
        return False
    if norm.num_features != layer.norm1.num_features + layer.last_conv.out_channels:
        return False
    if any(type(activation) is not nn.ReLU for activation in parts.activations):
        return False
    return conv is None or (
        type(conv) is type(layer.last_conv) and _is_usual(conv, 1) and conv.weight.dtype == layer.conv1.weight.dtype
    )


def can_share_stem(conv: nn.Module, norm: nn.Module, relu: nn.Module, pool: nn.Module, x: Tensor) -> bool:
    """Whether these are a stem that the shared engine can run as one on `x`."""
    dims = x.dim() - 2
    if type(conv) is not _CONVOLUTIONS.get(dims) or type(pool) is not _MAX_POOLS[dims] or type(relu) is not nn.ReLU:
        return False
    if not (is_norm(norm) and isinstance(norm, _NORMS[dims]) and _has_values(norm)):
        return False
    if any(map(is_watched, (conv, norm, relu, pool))) or pool.return_indices:
        return False
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str) or x.shape[1] != conv.in_channels:
        return False
    size = convolved_size(x.shape[2:], conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    if norm.training and sync_group(norm) is None and x.shape[0] * size.numel() == 1:
        return False  # a variance that there is none of, as the norm says itself
    layer = LayerParts(conv, norm, conv)
    return norm.num_features == conv.out_channels and _why_not_precision((layer,), x) is None


def convolved_size(size: Sequence[int], kernel_size: Sequence[int], *rest: Sequence[int]) -> torch.Size:
    """Of what a convolution makes of pictures of `size`; `rest` are its stride, padding and dilation."""
    sides = zip(size, kernel_size, *rest, strict=True)
    return torch.Size((side + 2 * pad - far * (kernel - 1) - 1) // step + 1 for side, kernel, step, pad, far in sides)


def _dims(conv: nn.Module) -> int:
    return len(conv.kernel_size)


def _is_usual(conv: nn.Module, kernel: int) -> bool:
    """Whether this is a convolution as DenseNets have it: it keeps the size, and has no bias."""
    dilation = conv.dilation[0]
    return (
        set(conv.kernel_size) == {kernel}
        and conv.padding == (kernel // 2 * dilation,) * _dims(conv)
        and set(conv.dilation) == {dilation}
        and set(conv.stride) == {1}
        and conv.groups == 1
        and conv.bias is None
        and conv.padding_mode == "zeros"
    )


def is_watched(module: nn.Module) -> bool:
    """Whether a hook, or a forward set on the instance, would notice that the module itself is not called."""
    return "forward" in vars(module) or any(getattr(module, hooks) for hooks in HOOKS)


def agree(first: nn.Module, other: nn.Module) -> bool:
    """Whether two norms normalise the same values alike."""
    return first.training == other.training and first.eps == other.eps and sync_group(first) == sync_group(other)


def _has_values(norm: nn.Module) -> bool:
    return norm.weight is not None and norm.bias is not None and (norm.training or norm.running_mean is not None)
