"""What a stage's forward saves for its backward, as a record: the features once, and little for each layer."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class SavedNorm:
    """The statistics of a norm that has its own: a bottleneck's, or any frozen one."""

    mean: Tensor | None = None
    inv_std: Tensor | None = None


@dataclass
class SavedLayer:
    """`norm1` is saved where it is frozen, `bottleneck` (pixels, channels) where the layer asks for it."""

    norm1: SavedNorm = field(default_factory=SavedNorm)
    norm2: SavedNorm = field(default_factory=SavedNorm)
    bottleneck: Tensor | None = None
    dropout_mask: Tensor | None = None


_TENSORS_OF_A_NORM, _TENSORS_OF_A_LAYER = 2, 6


@dataclass
class SavedStage:
    """`features` is (pixels, channels), centered unless the norms are frozen; `inv_std` is (channels,)."""

    features: Tensor
    inv_std: Tensor
    layers: list[SavedLayer]
    consumer_norm: SavedNorm = field(default_factory=SavedNorm)

    def flatten(self) -> list[Tensor | None]:
        """As `save_for_backward` takes them, always as many for as many layers."""
        tensors: list[Tensor | None] = [self.features, self.inv_std, *_flat_norm(self.consumer_norm)]
        for layer in self.layers:
            tensors += [*_flat_norm(layer.norm1), *_flat_norm(layer.norm2), layer.bottleneck, layer.dropout_mask]
        return tensors

    @classmethod
    def unflatten(cls, tensors: tuple[Any, ...], num_layers: int) -> tuple["SavedStage", list[Tensor | None]]:
        """The record again, from `ctx.saved_tensors`, and the tensors that were saved after it."""
        features, inv_std, *rest = tensors
        consumer_norm, rest = SavedNorm(*rest[:_TENSORS_OF_A_NORM]), rest[_TENSORS_OF_A_NORM:]
        stop = num_layers * _TENSORS_OF_A_LAYER
        layers = [_layer(rest[start : start + _TENSORS_OF_A_LAYER]) for start in range(0, stop, _TENSORS_OF_A_LAYER)]
        return cls(features, inv_std, layers, consumer_norm), rest[stop:]


def _flat_norm(norm: SavedNorm) -> tuple[Tensor | None, Tensor | None]:
    return norm.mean, norm.inv_std


def _layer(tensors: list[Tensor | None]) -> SavedLayer:
    mean1, inv_std1, mean2, inv_std2, bottleneck, dropout_mask = tensors
    return SavedLayer(SavedNorm(mean1, inv_std1), SavedNorm(mean2, inv_std2), bottleneck, dropout_mask)
