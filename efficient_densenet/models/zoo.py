"""The published variants as data, and the function that builds them."""

import difflib
import fnmatch
import inspect
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import torch

from .._checks import check
from ..weights.config import DEPTH, ModelConfig
from ..weights.load import load_weights
from ..weights.named import find_weights
from .arguments import THEIR_WORDS, DenseNetArguments, ModelArguments
from .densenet import DenseNet
from .fc_densenet import FCDenseNet

if TYPE_CHECKING:
    from typing_extensions import Unpack

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


@overload
def create_model(name: Literal["fc_densenet56", "fc_densenet67", "fc_densenet103"], **arguments: Any) -> FCDenseNet: ...


@overload
def create_model(name: str, **arguments: Any) -> DenseNet: ...


def create_model(name: str, *, weights: Any = None, adapt_input: str | None = None, **overrides: Any) -> Any:
    """Build the variant called `name`: a `DenseNet` or, for fc_densenet…, an `FCDenseNet`.

    Args:
        name: one of `list_models()`.
        weights: pretrained weights: a file, as in `load_weights`; the name of weights of this package; or torchvision's
            weights, by their name ("DEFAULT", "IMAGENET1K_V1") or as an enum member. The model has their numbers of
            classes and input channels, unless others are given; with another number of classes the classifier keeps its
            initialization. `model.weights_report` says what was loaded.
        adapt_input: for `weights` with other than their number of `in_channels`, as in `load_weights`.
        overrides: arguments of the class that replace the variant's.

    Examples:
        >>> model = create_model("densenet121", weights="DEFAULT", num_classes=14)
    """
    names = list_models()
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown model {name!r}: {hint}the zoo has {', '.join(names)}")
    cls, variant = _variant(name)
    allowed = list(inspect.signature(cls).parameters)
    unknown = [key for key in overrides if key not in allowed]
    if unknown:
        takes = f"{cls.__name__} takes {', '.join(allowed)}, and the zoo weights and adapt_input"
        words = [*allowed, "weights", "adapt_input"]
        ours, library = THEIR_WORDS.get(unknown[0], ("", ""))
        near = difflib.get_close_matches(unknown[0], words, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        if ours in words:
            hint = f"did you mean {ours!r}, which {library} call{'' if ' ' in library else 's'} {unknown[0]}? "
        raise TypeError(f"unknown argument {unknown[0]!r} for {name}: {hint}{takes}")
    if weights is None:
        return cls(**(variant | overrides))
    named = find_weights(name, weights)  # raises for a wrong name before anything is built
    theirs: dict[str, Any] = named.model_arguments
    model = cls(**(variant | theirs | overrides))
    skip = _unused(model, name, overrides, theirs.get("num_classes"))
    model.weights_report = load_weights(model, named.source(), skip=skip, adapt_input=adapt_input)
    return model


def build_configured(config: ModelConfig, engine: str = "best", keep_bottleneck: bool | None = None) -> DenseNet:
    """The model of a training run."""
    arguments: dict[str, Any] = {
        "drop_rate": config.drop_rate,
        "num_classes": len(config.classes),
        "in_channels": config.channels,
        "efficient": True if engine == "best" else engine,
        "keep_bottleneck": keep_bottleneck,
    }
    if config.model is not None:
        return create_model(config.model, **arguments)
    if config.depth is None or config.growth_rate is None:
        raise ValueError(f"found depth {config.depth} and growth rate {config.growth_rate}, but a model needs both")
    check("depth", config.depth, DEPTH)
    layers = (config.depth - 4) // 6  # the stem, two transitions and the classifier are the other four
    return DenseNet(config.growth_rate, (layers,) * 3, num_init_features=2 * config.growth_rate, **arguments)


def _variant(name: str) -> tuple[type[DenseNet] | type[FCDenseNet], dict[str, Any]]:
    """The class of a variant, and its arguments."""
    return (DenseNet, VARIANTS[name]) if name in VARIANTS else (FCDenseNet, FC_VARIANTS[name])


def _unused(model: DenseNet | FCDenseNet, name: str, overrides: dict[str, Any], num_classes: int | None) -> list[str]:
    """The keys of weights for `num_classes` that this model does not load: the classifier, or modules that a backbone
    lacks. Weights without a classifier have no `num_classes`."""
    if isinstance(model, FCDenseNet) or not model.features_only:
        return [] if model.num_classes == (num_classes or 0) else ["classifier"]
    if num_classes is None:
        return []
    whole = {key: value for key, value in overrides.items() if key not in ("features_only", "out_indices", "maps")}
    with torch.device("meta"):
        keys = create_model(name, **whole).state_dict().keys()
    return sorted(keys - model.state_dict().keys())


class DenseNetBuilder(Protocol):
    def __call__(self, **arguments: "Unpack[DenseNetArguments]") -> DenseNet:
        """Build the variant of this name, as in `densenet121(weights="DEFAULT", num_classes=14)`."""
        ...


class FCDenseNetBuilder(Protocol):
    def __call__(self, **arguments: "Unpack[ModelArguments]") -> FCDenseNet:
        """Build the variant of this name, as in `fc_densenet103(num_classes=3, in_channels=1)`."""
        ...


def _builder(name: str) -> Any:
    """The function that builds a variant. Its signature has the variant's defaults."""
    cls, variant = _variant(name)

    def build(**arguments: Any) -> Any:
        return create_model(name, **arguments)

    named = [
        each.replace(kind=each.KEYWORD_ONLY, default=variant.get(key, each.default))
        for key, each in inspect.signature(cls).parameters.items()
    ]
    named += [inspect.Parameter(key, named[0].kind, default=None) for key in ("weights", "adapt_input")]
    vars(build)["__signature__"] = inspect.Signature(named, return_annotation=cls)
    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"""Build a `{cls.__name__}`, which describes the arguments, as `create_model` does `weights` and
    `adapt_input`.

    Examples:
        >>> model = {name}(num_classes=3, in_channels=1)
    """
    return build


densenet_40_12: DenseNetBuilder = _builder("densenet_40_12")
densenet_100_12: DenseNetBuilder = _builder("densenet_100_12")
densenet_100_24: DenseNetBuilder = _builder("densenet_100_24")
densenet_bc_100_12: DenseNetBuilder = _builder("densenet_bc_100_12")
densenet_bc_250_24: DenseNetBuilder = _builder("densenet_bc_250_24")
densenet_bc_190_40: DenseNetBuilder = _builder("densenet_bc_190_40")
densenet_bc_40_36: DenseNetBuilder = _builder("densenet_bc_40_36")
densenet_bc_40_48: DenseNetBuilder = _builder("densenet_bc_40_48")
densenet_bc_40_60: DenseNetBuilder = _builder("densenet_bc_40_60")
densenet121: DenseNetBuilder = _builder("densenet121")
densenet169: DenseNetBuilder = _builder("densenet169")
densenet201: DenseNetBuilder = _builder("densenet201")
densenet161: DenseNetBuilder = _builder("densenet161")
densenet264: DenseNetBuilder = _builder("densenet264")
densenet232_48: DenseNetBuilder = _builder("densenet232_48")
densenet264_48: DenseNetBuilder = _builder("densenet264_48")
fc_densenet56: FCDenseNetBuilder = _builder("fc_densenet56")
fc_densenet67: FCDenseNetBuilder = _builder("fc_densenet67")
fc_densenet103: FCDenseNetBuilder = _builder("fc_densenet103")
