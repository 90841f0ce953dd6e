"""What the shared engine can take."""

import torch
from torch import Tensor, nn

from ..batchnorm import CpBatchNorm2d
from ..checkpoint.parameters import parameters_of

LAYERS: set[type[nn.Module]] = set()
"""The classes of layer that are known to do what the shared engine does."""

_NORMS = (nn.BatchNorm2d, CpBatchNorm2d)
_HALVES = (torch.float16, torch.bfloat16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_not_shared(block: nn.Module, x: Tensor) -> str | None:
    """Why the shared engine cannot run `block` on `x`, or None where it can."""
    layers = list(block.children())
    for layer in layers:
        reason = _why_not_layer(layer)
        if reason is not None:
            return reason
    norms = [layer.norm1 for layer in layers]
    if not all(agree(norms[0], norm) for norm in norms):
        return "found norms in one block that disagree about training mode or eps, but they share their statistics"
    reason = _why_not_precision(layers, x)
    if reason is not None:
        return reason
    if norms[0].training and x.shape[0] * x.shape[2:].numel() == 1:
        return "found a single value per channel, of which there is no variance"
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


def can_consume(block: nn.Module, consumer: nn.Module | None) -> bool:
    """Whether the shared engine can run `consumer`, a transition or a norm, with the block before it.

    Where a hook watches either of them, the features between them must exist.
    """
    if consumer is None or is_watched(block) or any(map(is_watched, consumer.modules())):
        return False
    norm, *rest = consumer.children() if isinstance(consumer, nn.Sequential) else [consumer]
    if rest and not _is_transition(consumer):
        return False
    layer = next(block.children())
    if not _takes_norm(norm) or not agree(layer.norm1, norm) or norm.weight.dtype != layer.norm1.weight.dtype:
        return False
    return not rest or consumer.conv.weight.dtype == layer.conv1.weight.dtype


def _is_transition(consumer: nn.Module) -> bool:
    if type(consumer).forward is not nn.Sequential.forward or len(consumer) != 4:
        return False
    _, relu, conv, pool = consumer
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
    return first.training == other.training and first.eps == other.eps


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
    return type(norm) in _NORMS and norm.weight is not None and (norm.training or norm.running_mean is not None)
