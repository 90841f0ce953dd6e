"""What the shared engine can take."""

import torch
from torch import Tensor, nn

from ..batchnorm import CpBatchNorm2d

_NORMS = (nn.BatchNorm2d, CpBatchNorm2d)
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
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        return f"found autocast on {x.device.type}, but the shared engine runs in the precision of its input"
    dtypes = {x.dtype, *(p.dtype for p in (norms[0].weight, layers[0].conv1.weight))}
    if len(dtypes) > 1 or x.dtype not in (torch.float32, torch.float64):
        return f"found {', '.join(sorted(map(str, dtypes)))}, but the shared engine needs float32 or float64 throughout"
    if norms[0].training and x.shape[0] * x.shape[2:].numel() == 1:
        return "found a single value per channel, of which there is no variance"
    return None


def can_consume(block: nn.Module, consumer: nn.Module | None) -> bool:
    """Whether the shared engine can run `consumer`, a transition or a norm, with the block before it.

    Where a hook watches either of them, the features between them must exist.
    """
    if consumer is None or is_watched(block) or any(map(is_watched, consumer.modules())):
        return False
    norm, *rest = consumer.children() if isinstance(consumer, nn.Sequential) else [consumer]
    if rest and [type(module) for module in rest] != [nn.ReLU, nn.Conv2d, nn.AvgPool2d]:
        return False
    return _takes_norm(norm) and agree(next(block.children()).norm1, norm)


def is_watched(module: nn.Module) -> bool:
    """Whether a hook would notice that the module itself is not called."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


def agree(first: nn.Module, other: nn.Module) -> bool:
    return first.training == other.training and first.eps == other.eps


def _why_not_layer(layer: nn.Module) -> str | None:
    for module in layer.modules():
        if is_watched(module):
            return f"found a hook on a {type(module).__name__} inside a layer, which the shared engine does not call"
        if "parametrizations" in module._modules:
            return f"found a parametrization of a {type(module).__name__} inside a layer"
    kinds = [nn.ReLU, nn.Conv2d, nn.ReLU, nn.Conv2d] if layer.has_bottleneck else [nn.ReLU, nn.Conv2d]
    norms, others = [], []
    for module in layer.children():
        (norms if type(module) in _NORMS else others).append(module)
    for module, kind in zip(others, kinds, strict=False):
        if type(module) is not kind:
            return f"found a {type(module).__name__} inside a layer, where the shared engine takes {kind.__name__}"
    if len(others) != len(kinds) or not all(map(_takes_norm, norms)):
        return "found a layer that is not batch norm, ReLU and convolution in turn, with running statistics and weights"
    return None


def _takes_norm(norm: nn.Module) -> bool:
    return type(norm) in _NORMS and norm.weight is not None and (norm.training or norm.running_mean is not None)
