"""The per-layer checkpointing engines: the backward recomputes each layer's concatenation, first norm and ReLU."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from .._torch_private import parametrization_cache_enabled
from ..checkpoint.call import checkpoint_call
from ..checkpoint.hooks import hooks_take_part
from ..norms.batch_norm import update_once
from .plain import Layer


def run_first_half_official(layer: Layer, features: list[Tensor]) -> Tensor:
    update_once(layer.norm1)
    to_the_end = not torch.compiler.is_compiling() and hooks_take_part(layer.modules())
    with set_checkpoint_early_stop(False) if to_the_end else nullcontext():
        return torch_checkpoint(layer.first_half, *features, use_reentrant=False)


def run_first_half_checkpoint(layer: Layer, features: list[Tensor]) -> Tensor:
    return checkpoint_call(layer.first_half, tuple(features), {})


def why_not_recompute(block: nn.Module) -> str | None:
    """Why the layers of `block` cannot be recomputed, or None."""
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
