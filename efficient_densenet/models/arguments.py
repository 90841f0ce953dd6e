"""The keyword arguments of the zoo's functions: those of the models' classes, which describe them, and weights."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from ..engine.choose import EngineName
from .activations import ActivationFactory


class ModelArguments(TypedDict, total=False):
    """The arguments of `FCDenseNet`, which `DenseNet` has too, and those of `create_model`."""

    growth_rate: int
    block_config: Sequence[int]
    num_init_features: int
    drop_rate: float
    num_classes: int
    efficient: bool | EngineName
    in_channels: int
    memory_efficient: bool | EngineName | None
    dims: int
    activation: str | ActivationFactory
    weights: Any
    adapt_input: str | None


class DenseNetArguments(ModelArguments, total=False):
    """The further arguments of `DenseNet`."""

    compression: float
    bn_size: int | None
    small_inputs: bool
    init: Literal["fan_out", "fan_in"] | None
    keep_bottleneck: bool | None
    memory_budget: int | str | None
    output_stride: int | None
    features_only: bool
    out_indices: int | Sequence[int] | None
    maps: str


THEIR_WORDS = {
    "act": ("activation", "MONAI"),
    "act_layer": ("activation", "timm"),
    "checkpoint_path": ("weights", "timm"),
    "dropout": ("drop_rate", "other libraries"),
    "dropout_prob": ("drop_rate", "MONAI"),
    "in_chans": ("in_channels", "timm"),
    "init_features": ("num_init_features", "MONAI"),
    "out_channels": ("num_classes", "MONAI"),
    "pretrained": ("weights", "timm and MONAI"),
    "proj_drop_rate": ("drop_rate", "timm"),
    "spatial_dims": ("dims", "MONAI"),
}
"""Names of arguments in other libraries, ours, and the libraries."""
