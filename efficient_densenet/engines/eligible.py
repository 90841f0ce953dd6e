"""What the shared engine can take."""

import torch
from torch import Tensor, nn

from ..batchnorm import CpBatchNorm2d
from ..checkpoint.parameters import parameters_of
from ..synced_norm import SyncedBatchNorm2d, together
from ..torch_private import hooks_watch_all_modules

LAYERS: set[type[nn.Module]] = set()
"""The classes of layer that are known to do what the shared engine does."""

_NORMS = (nn.BatchNorm2d, CpBatchNorm2d, SyncedBatchNorm2d)
_HALVES = (torch.float16, torch.bfloat16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_not_shared(block: nn.Module, x: Tensor) -> str | None:
    """Why the shared engine cannot run `block` on `x`, or None where it can."""
    if hooks_watch_all_modules():
        return "found a hook on all modules, and those inside a layer are not called"
    layers = list(block.children())
    for layer in layers:
        reason = _why_not_layer(layer)
        if reason is not None:
            return reason
    reason = _why_not_widths(layers, x)
    if reason is not None:
        return reason
    norms = [layer.norm1 for layer in layers]
    if not all(agree(norms[0], norm) for norm in norms):
        return (
            "found norms in one block that disagree about training mode, eps or processes, but share their statistics"
        )
    reason = _why_not_precision(layers, x)
    if reason is not None:
        return reason
    inside = [layer.norm2 for layer in layers if layer.has_bottleneck]
    joined = together(norms[0]) is not None
    if any(together(norm) != together(norms[0]) or (joined and norm.training != norms[0].training) for norm in inside):
        return "found synchronised norms beside others in one block"
    if any(norm.training for norm in (norms[0], *inside)) and x.shape[0] * x.shape[2:].numel() == 1:
        return "found a single value per channel, of which there is no variance"
    return None


def _why_not_widths(layers: list[nn.Module], x: Tensor) -> str | None:
    """Each layer reads all there is, and adds as much as the others."""
    if x.dim() != 4:
        return f"found an input of {x.dim()} dimensions, where the shared engine takes 4"
    growth_rate = list(layers[0].children())[-1].out_channels
    for i, layer in enumerate(layers):
        *_, last = layer.children()
        expected = x.shape[1] + i * growth_rate
        if layer.norm1.num_features != expected or last.out_channels != growth_rate:
            return (
                f"found a layer from {layer.norm1.num_features} channels to {last.out_channels}, where the shared "
                f"engine takes one from {expected} to {growth_rate}"
            )
        if layer.has_bottleneck and layer.norm2.num_features != layer.conv1.out_channels:
            return f"found a norm of {layer.norm2.num_features} channels after {layer.conv1.out_channels}"
    return None


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision of convolutions of `x`: autocast's, which leaves float64 alone, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if _casts(x) and x.dtype != torch.float64 else x.dtype


def _why_not_precision(layers: list[nn.Module], x: Tensor) -> str | None:
    """Features have their input's precision, norms that or float32, and convolutions autocast's or their input's."""
    convolutions = compute_dtype(x)
    of_convolutions = {convolutions} | ({torch.float32} if _casts(x) and x.dtype != torch.float64 else set())
    of_norms = {x.dtype} | ({torch.float32} if x.dtype in _HALVES else set())
    for module in (module for layer in layers for module in layer.children()):
        found = {tensor.dtype for tensor in parameters_of(module)}
        if not found <= (of_convolutions if type(module) is nn.Conv2d else of_norms):
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
    """Whether the shared engine can run `consumer`, a transition or a norm, with a block that it runs.

    Where a hook watches it, the features that it reads must exist.
    """
    if any(map(is_watched, consumer.modules())):
        return False
    norm, *rest = consumer.children() if _is_transition(consumer) else [consumer]
    *_, layer = block.children()
    *_, last = layer.children()
    if not _takes_norm(norm) or not agree(layer.norm1, norm) or norm.weight.dtype != layer.norm1.weight.dtype:
        return False
    if norm.num_features != layer.norm1.num_features + last.out_channels:
        return False
    return not rest or rest[1].weight.dtype == layer.conv1.weight.dtype


def _is_transition(consumer: nn.Module) -> bool:
    parts = list(consumer.children())
    if type(consumer).forward is not nn.Sequential.forward or len(parts) != 4:
        return False
    _, relu, conv, pool = parts
    halves = type(pool) is nn.AvgPool2d and [_pair(v) for v in (pool.kernel_size, pool.stride, pool.padding)]
    usual = halves == [(2, 2), (2, 2), (0, 0)] and not pool.ceil_mode and not pool.divisor_override
    return type(relu) is nn.ReLU and _is_usual(conv, 1) and usual


def _is_usual(conv: nn.Module, kernel: int) -> bool:
    """Whether this is a convolution as DenseNets have it: it keeps the size, and has no bias."""
    return (
        type(conv) is nn.Conv2d
        and conv.kernel_size == (kernel, kernel)
        and conv.padding == (kernel // 2, kernel // 2)
        and conv.stride == conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is None
        and conv.padding_mode == "zeros"
    )


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def is_watched(module: nn.Module) -> bool:
    """Whether a hook, or a forward set on the instance, would notice that the module itself is not called."""
    return "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS)


def agree(first: nn.Module, other: nn.Module) -> bool:
    """Whether two norms normalise the same values alike."""
    return first.training == other.training and first.eps == other.eps and together(first) == together(other)


def _why_not_layer(layer: nn.Module) -> str | None:
    if type(layer) not in LAYERS:
        return f"found a layer of class {type(layer).__name__}, which may do other things than a dense layer"
    for module in layer.modules():
        if is_watched(module):
            return f"found a hook on, or a new forward of, a {type(module).__name__} inside a layer, which it passes by"
        if "parametrizations" in module._modules:
            return f"found a parametrization of a {type(module).__name__} inside a layer"
    kinds = [nn.ReLU, nn.Conv2d, nn.ReLU, nn.Conv2d] if layer.has_bottleneck else [nn.ReLU, nn.Conv2d]
    norms, others = [], []
    for module in layer.children():
        (norms if type(module) in _NORMS else others).append(module)
    for module, kind in zip(others, kinds, strict=False):
        if type(module) is not kind:
            return f"found a {type(module).__name__} inside a layer, where the shared engine takes {kind.__name__}"
    convolutions = [module for module in others if type(module) is nn.Conv2d]
    usual = all(_is_usual(conv, kernel) for conv, kernel in zip(convolutions[::-1], (3, 1), strict=False))
    if len(others) != len(kinds) or not usual or not all(map(_takes_norm, norms)):
        return "found a layer that is not batch norm, ReLU and convolution in turn, all of the usual kind"
    return None


def _takes_norm(norm: nn.Module) -> bool:
    learns = type(norm) in _NORMS and norm.weight is not None and norm.bias is not None
    return learns and (norm.training or norm.running_mean is not None)
