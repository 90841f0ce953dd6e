"""The per-layer checkpointing engines: the backward recomputes each layer's concatenation, first norm and ReLU."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .._torch_private import parametrization_cache_enabled
from ..checkpoint import CheckpointFunction
from ..checkpoint.hooks import fire_once
from ..checkpoint.parameters import parameters_of
from ..norms.batch_norm import update_once
from .plain import Layer


def run_first_half_official(layer: Layer, features: list[Tensor]) -> Tensor:
    update_once(layer.norm1)
    return torch_checkpoint(layer.first_half, *features, use_reentrant=False)


def run_first_half_checkpoint(layer: Layer, features: list[Tensor]) -> Tensor:
    for module in layer.modules():
        update_once(module)
        fire_once(module)
    return CheckpointFunction.apply(layer.first_half, len(features), *features, *parameters_of(layer))


def why_not_recompute(block: nn.Module) -> str | None:
    """Why the layers of `block` cannot be recomputed, or None."""
    for module in block.modules():
        parametrizations = module._modules.get("parametrizations")
        if parametrizations is None:
            continue
        if parametrization_cache_enabled():
            return "found parametrizations whose results are being cached, which a recomputation would not repeat"
        if module.training and any(True for _ in parametrizations.buffers()):
            return f"found a parametrization of a {type(module).__name__} that changes its own state when it is run"
    return None
