"""The published variants as data, and the function that builds them."""

import difflib
import fnmatch
import inspect
from typing import Any

import torch

from ..weights.load import load_weights
from ..weights.named import find_weights
from .densenet import DenseNet
from .fc_densenet import FCDenseNet

_CIFAR = {"compression": 0.5, "bn_size": 4, "small_inputs": True, "num_classes": 10}
_CIFAR_BASIC = _CIFAR | {"compression": 1.0, "bn_size": 0, "num_init_features": 16}
_IMAGENET = {"compression": 0.5, "bn_size": 4, "small_inputs": False, "num_classes": 1000}
_IMAGENET_32 = _IMAGENET | {"growth_rate": 32, "num_init_features": 64}
_IMAGENET_48 = _IMAGENET | {"growth_rate": 48, "num_init_features": 96}

VARIANTS: dict[str, dict[str, Any]] = {
    "densenet_40_12": _CIFAR_BASIC | {"growth_rate": 12, "block_config": (12,) * 3},
    "densenet_100_12": _CIFAR_BASIC | {"growth_rate": 12, "block_config": (32,) * 3},
    "densenet_100_24": _CIFAR_BASIC | {"growth_rate": 24, "block_config": (32,) * 3},
    "densenet_bc_100_12": _CIFAR | {"growth_rate": 12, "block_config": (16,) * 3, "num_init_features": 24},
    "densenet_bc_250_24": _CIFAR | {"growth_rate": 24, "block_config": (41,) * 3, "num_init_features": 48},
    "densenet_bc_190_40": _CIFAR | {"growth_rate": 40, "block_config": (31,) * 3, "num_init_features": 80},
    "densenet_bc_40_36": _CIFAR | {"growth_rate": 36, "block_config": (6,) * 3, "num_init_features": 72},
    "densenet_bc_40_48": _CIFAR | {"growth_rate": 48, "block_config": (6,) * 3, "num_init_features": 96},
    "densenet_bc_40_60": _CIFAR | {"growth_rate": 60, "block_config": (6,) * 3, "num_init_features": 120},
    "densenet121": _IMAGENET_32 | {"block_config": (6, 12, 24, 16)},
    "densenet169": _IMAGENET_32 | {"block_config": (6, 12, 32, 32)},
    "densenet201": _IMAGENET_32 | {"block_config": (6, 12, 48, 32)},
    "densenet161": _IMAGENET_48 | {"block_config": (6, 12, 36, 24)},
    "densenet264": _IMAGENET_32 | {"block_config": (6, 12, 64, 48)},
    "densenet232_48": _IMAGENET_48 | {"block_config": (6, 12, 48, 48)},
    "densenet264_48": _IMAGENET_48 | {"block_config": (6, 12, 64, 48)},
}

FC_VARIANTS: dict[str, dict[str, Any]] = {
    "fc_densenet56": {"growth_rate": 12, "block_config": (4,) * 11},
    "fc_densenet67": {"growth_rate": 16, "block_config": (5,) * 11},
    "fc_densenet103": {"growth_rate": 16, "block_config": (4, 5, 7, 10, 12, 15, 12, 10, 7, 5, 4)},
}
"""The variants that label every pixel, as arguments of `FCDenseNet`."""


def list_models(pattern: str = "*") -> list[str]:
    """The names of the variants that match a shell pattern such as "densenet_bc_*"."""
    return fnmatch.filter([*VARIANTS, *FC_VARIANTS], pattern)


def create_model(name: str, *, weights: Any = None, adapt_input: str | None = None, **overrides: Any) -> Any:
    """Build the variant called `name`: a `DenseNet` or, for fc_densenet…, an `FCDenseNet`.

    Args:
        name: one of `list_models()`.
        weights: pretrained weights: the name of weights of this package, or torchvision's weights, by their name
            ("DEFAULT", "IMAGENET1K_V1") or as an enum member. With another number of classes the classifier keeps
            its initialization; `model.weights_report` says what was loaded.
        adapt_input: for `weights` with other than three `in_channels`, as in `load_weights`.
        overrides: arguments of the class that replace the variant's.
    """
    names = list_models()
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown model {name!r}: {hint}the zoo has {', '.join(names)}")
    cls, variants = (DenseNet, VARIANTS) if name in VARIANTS else (FCDenseNet, FC_VARIANTS)
    allowed = list(inspect.signature(cls).parameters)
    unknown = [key for key in overrides if key not in allowed]
    if unknown:
        hint = "give weights=...; " if unknown[0] == "pretrained" else ""
        takes = f"{cls.__name__} takes {', '.join(allowed)}, and the zoo weights and adapt_input"
        raise TypeError(f"unknown argument {unknown[0]!r} for {name}: {hint}{takes}")
    if weights is None:
        return cls(**(variants[name] | overrides))
    named = find_weights(name, weights)  # raises for a wrong name before anything is built
    model = DenseNet(**(variants[name] | named.model_arguments | overrides))
    skip = _unused(model, name, named.model_arguments["num_classes"])
    model.weights_report = load_weights(model, named.source(), skip=skip, adapt_input=adapt_input)
    return model


def _unused(model: DenseNet, name: str, num_classes: int) -> list[str]:
    """The keys of weights for `num_classes` that this model does not load: the classifier, or modules that a backbone
    lacks."""
    if not model.features_only:
        return [] if model.num_classes == num_classes else ["classifier"]
    with torch.device("meta"):
        whole = create_model(name)
    return sorted(whole.state_dict().keys() - model.state_dict().keys())


def densenet_40_12(**overrides: Any) -> DenseNet:
    return create_model("densenet_40_12", **overrides)


def densenet_100_12(**overrides: Any) -> DenseNet:
    return create_model("densenet_100_12", **overrides)


def densenet_100_24(**overrides: Any) -> DenseNet:
    return create_model("densenet_100_24", **overrides)


def densenet_bc_100_12(**overrides: Any) -> DenseNet:
    return create_model("densenet_bc_100_12", **overrides)


def densenet_bc_250_24(**overrides: Any) -> DenseNet:
    return create_model("densenet_bc_250_24", **overrides)


def densenet_bc_190_40(**overrides: Any) -> DenseNet:
    return create_model("densenet_bc_190_40", **overrides)


def densenet_bc_40_36(**overrides: Any) -> DenseNet:
    return create_model("densenet_bc_40_36", **overrides)


def densenet_bc_40_48(**overrides: Any) -> DenseNet:
    return create_model("densenet_bc_40_48", **overrides)


def densenet_bc_40_60(**overrides: Any) -> DenseNet:
    return create_model("densenet_bc_40_60", **overrides)


def densenet121(**overrides: Any) -> DenseNet:
    return create_model("densenet121", **overrides)


def densenet169(**overrides: Any) -> DenseNet:
    return create_model("densenet169", **overrides)


def densenet201(**overrides: Any) -> DenseNet:
    return create_model("densenet201", **overrides)


def densenet161(**overrides: Any) -> DenseNet:
    return create_model("densenet161", **overrides)


def densenet264(**overrides: Any) -> DenseNet:
    return create_model("densenet264", **overrides)


def densenet232_48(**overrides: Any) -> DenseNet:
    return create_model("densenet232_48", **overrides)


def densenet264_48(**overrides: Any) -> DenseNet:
    return create_model("densenet264_48", **overrides)


def fc_densenet56(**overrides: Any) -> FCDenseNet:
    return create_model("fc_densenet56", **overrides)


def fc_densenet67(**overrides: Any) -> FCDenseNet:
    return create_model("fc_densenet67", **overrides)


def fc_densenet103(**overrides: Any) -> FCDenseNet:
    return create_model("fc_densenet103", **overrides)
