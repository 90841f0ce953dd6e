"""The engines that run a dense block layer by layer: plain, official and checkpoint.

Plain runs concatenation, norm, ReLU and convolution as torch modules, which save their inputs for backward. The other
two checkpoint the first half of each layer: the backward recomputes its concatenation, first norm and ReLU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from .._torch_private import parametrization_cache_enabled
from ..checkpoint.call import checkpoint_call, may_stop_early
from ..norms.batch_norm import update_once
from .limits import function_mode

Layer: TypeAlias = Any
"""A module with `norm1` and `first_half(*features)`: a dense layer of our models, or a layer of another library."""

RunFirstHalf = Callable[[Layer, list[Tensor]], Tensor]
"""How an engine runs a layer's first half (concatenation, norm, ReLU, first convolution) on a list of features; of a
converted block, the layer whole."""


def run_first_half_plain(layer: Layer, features: list[Tensor]) -> Tensor:
    return layer.first_half(*features)


def run_first_half_official(layer: Layer, features: list[Tensor]) -> Tensor:
    update_once(layer.norm1)
    stops_early = torch.compiler.is_compiling() or may_stop_early(layer.modules())
    with nullcontext() if stops_early else set_checkpoint_early_stop(False):
        return torch_checkpoint(layer.first_half, *features, use_reentrant=False)


def run_first_half_checkpoint(layer: Layer, features: list[Tensor]) -> Tensor:
    return checkpoint_call(layer.first_half, tuple(features), {})


def why_not_recompute(block: nn.Module) -> str | None:
    """Why the layers of `block` cannot be recomputed, or None."""
    if function_mode() is not None:
        return f"found a {function_mode()}, a function mode, which a recomputation in the backward might not be in"
    for module in block.modules():
        if module.training and any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
            return f"found a spectral_norm of a {type(module).__name__} that changes its own state when it is run"
        parametrizations = module._modules.get("parametrizations")
        if parametrizations is None:
            continue
        if parametrization_cache_enabled():
            return "found parametrizations whose results are being cached, which a recomputation would not repeat"
        if module.training and any(True for _ in parametrizations.buffers()):
            return f"found a parametrization of a {type(module).__name__} that changes its own state when it is run"
    return None
