"""Per-layer recomputation: the concatenation, its norm and its ReLU are made again in the backward, not kept."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..checkpoint import CheckpointFunction
from ..checkpoint.parameters import parameters_of


def squeeze_official(layer: nn.Module, features: list[Tensor]) -> Tensor:
    return torch_checkpoint(layer.squeeze, *features, use_reentrant=False)


def squeeze_checkpoint(layer: nn.Module, features: list[Tensor]) -> Tensor:
    parameters = parameters_of(layer.norm1, layer.relu1, layer.conv1)
    return CheckpointFunction.apply(layer.squeeze, len(features), *features, *parameters)
