"""The ways to train a DenseNet that are compared: ours, torchvision's, timm's, and torch.compile of the plain one."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from settings import architecture
from torch import nn

from efficient_densenet import DenseNet, make_efficient
from efficient_densenet.engines import kernels


class Method(NamedTuple):
    label: str
    build: Callable[[dict[str, Any]], nn.Module]
    package: str = "efficient_densenet"


def _ours(arguments: dict[str, Any], **overrides: Any) -> nn.Module:
    return DenseNet(**(arguments | overrides))


def _without_numba(arguments: dict[str, Any]) -> nn.Module:
    kernels.numba_supports = lambda values: False  # of this process, which measures nothing else
    return _ours(arguments, efficient="shared")


def _compiled(arguments: dict[str, Any]) -> nn.Module:
    return torch.compile(_ours(arguments, efficient="plain"))


def _torchvision(arguments: dict[str, Any], memory_efficient: bool) -> nn.Module:
    shape = {name: arguments[name] for name in ("growth_rate", "block_config", "num_init_features", "num_classes")}
    model = importlib.import_module("torchvision.models").DenseNet(**shape, memory_efficient=memory_efficient)
    return _with_stem_for(arguments, model)


def _torchvision_converted(arguments: dict[str, Any]) -> nn.Module:
    model = _torchvision(arguments, memory_efficient=False)
    make_efficient(model, "shared")
    return model


def _timm(arguments: dict[str, Any], memory_efficient: bool) -> nn.Module:
    shape = {name: arguments[name] for name in ("growth_rate", "block_config", "num_classes")}
    model = importlib.import_module("timm.models.densenet").DenseNet(**shape, memory_efficient=memory_efficient)
    return _with_stem_for(arguments, model)


def _with_stem_for(arguments: dict[str, Any], model: nn.Module) -> nn.Module:
    """Both libraries know the stem for ImageNet only: for small pictures a single 3×3 convolution takes its place."""
    if arguments["small_inputs"]:
        model.features.conv0 = nn.Conv2d(3, arguments["num_init_features"], 3, padding=1, bias=False)
        for name in {"norm0", "relu0", "pool0"} & set(model.features._modules):
            setattr(model.features, name, nn.Identity())
    return model


METHODS: dict[str, Method] = {
    "plain": Method("torch modules, everything kept", partial(_ours, efficient="plain")),
    "shared": Method("the features once, nothing concatenated", partial(_ours, efficient="shared")),
    "shared_keep": Method("the same, bottlenecks kept", partial(_ours, efficient="shared", keep_bottleneck=True)),
    "shared_portable": Method("`shared` without Numba", _without_numba),
    "checkpoint": Method("our recomputation of each layer", partial(_ours, efficient="checkpoint")),
    "official": Method("torch.utils.checkpoint around each layer", partial(_ours, efficient="official")),
    "torchvision": Method("torchvision's DenseNet", partial(_torchvision, memory_efficient=False), "torchvision"),
    "torchvision_efficient": Method(
        "torchvision's, `memory_efficient=True`", partial(_torchvision, memory_efficient=True), "torchvision"
    ),
    "torchvision_converted": Method("torchvision's, `make_efficient`", _torchvision_converted, "torchvision"),
    "timm": Method("timm's DenseNet", partial(_timm, memory_efficient=False), "timm"),
    "timm_efficient": Method("timm's, `memory_efficient=True`", partial(_timm, memory_efficient=True), "timm"),
    "compile": Method("`torch.compile` of plain", _compiled),
}


def choose(names: list[str], model: str) -> list[str]:
    """`names`, plain first since all are compared with it, less those that cannot run here: a line says why."""
    for name in names:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}: there are {', '.join(METHODS)}")
    chosen = ["plain", *(name for name in METHODS if name in names and name != "plain")]
    reasons = {name: reason for name in chosen if (reason := hindrance(name, model))}
    for name, reason in reasons.items():
        print(f"{name} left out: {reason}")
    return [name for name in chosen if name not in reasons]


def hindrance(name: str, model: str) -> str | None:
    """Why this method cannot train `model` here."""
    package = METHODS[name].package
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    shape = architecture(model)
    usual = shape["bn_size"] == 4 and shape["compression"] == 0.5
    if package in ("torchvision", "timm") and not usual:
        return f"{package} has no DenseNet without bottlenecks or compression, as {model} is"
    if package == "timm" and shape["num_init_features"] != 2 * shape["growth_rate"]:
        return f"timm's stem has twice the growth rate of channels, that of {model} has not"
    return None
