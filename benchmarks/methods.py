"""The methods that are compared: DenseNets of this package, torchvision and timm; ours compiled, or as CUDA graphs."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from settings import architecture
from torch import nn

from efficient_densenet import DenseNet, kernels, make_efficient


class Method(NamedTuple):
    """A label for the table, a function from `DenseNet` arguments to a model, the package that it needs, and whether
    forward, loss and backward run as one CUDA graph."""

    label: str
    build: Callable[[dict[str, Any]], nn.Module]
    package: str = "efficient_densenet"
    as_cuda_graph: bool = False


def _ours(arguments: dict[str, Any], **overrides: Any) -> nn.Module:
    return DenseNet(**(arguments | overrides))


def _portable(arguments: dict[str, Any]) -> nn.Module:
    kernels.numba_supports = lambda values: False  # this process measures nothing else
    return _ours(arguments, efficient="shared")


def _compiled(arguments: dict[str, Any], efficient: str) -> nn.Module:
    compiled: Any = torch.compile(_ours(arguments, efficient=efficient), fullgraph=True)
    return compiled


def _torchvision(arguments: dict[str, Any], memory_efficient: bool) -> nn.Module:
    shape = {name: arguments[name] for name in ("growth_rate", "block_config", "num_init_features", "num_classes")}
    model = importlib.import_module("torchvision.models").DenseNet(**shape, memory_efficient=memory_efficient)
    return _with_small_stem(arguments, model)


def _torchvision_converted(arguments: dict[str, Any]) -> nn.Module:
    model = _torchvision(arguments, memory_efficient=False)
    make_efficient(model, "shared")
    return model


def _timm(arguments: dict[str, Any], memory_efficient: bool) -> nn.Module:
    shape = {name: arguments[name] for name in ("growth_rate", "block_config", "num_classes")}
    model = importlib.import_module("timm.models.densenet").DenseNet(**shape, memory_efficient=memory_efficient)
    return _with_small_stem(arguments, model)


def _with_small_stem(arguments: dict[str, Any], model: Any) -> nn.Module:
    """For small inputs, replace the ImageNet stem, the only one of both libraries, by a single 3×3 convolution."""
    if arguments["small_inputs"]:
        model.features.conv0 = nn.Conv2d(3, arguments["num_init_features"], 3, padding=1, bias=False)
        for name in {"norm0", "relu0", "pool0"} & set(model.features._modules):
            setattr(model.features, name, nn.Identity())
    return model


METHODS: dict[str, Method] = {
    "plain": Method("torch modules, everything kept", partial(_ours, efficient="plain")),
    "shared": Method("the features once, nothing concatenated", partial(_ours, efficient="shared")),
    "shared_keep": Method("the same, bottlenecks kept", partial(_ours, efficient="shared", keep_bottleneck=True)),
    "shared_portable": Method("`shared` without Numba", _portable),
    "checkpoint": Method("our recomputation of each layer", partial(_ours, efficient="checkpoint")),
    "official": Method("torch.utils.checkpoint around each layer", partial(_ours, efficient="official")),
    "torchvision": Method("torchvision's DenseNet", partial(_torchvision, memory_efficient=False), "torchvision"),
    "torchvision_efficient": Method(
        "torchvision's, `memory_efficient=True`", partial(_torchvision, memory_efficient=True), "torchvision"
    ),
    "torchvision_converted": Method("torchvision's, `make_efficient`", _torchvision_converted, "torchvision"),
    "timm": Method("timm's DenseNet", partial(_timm, memory_efficient=False), "timm"),
    "timm_efficient": Method("timm's, `memory_efficient=True`", partial(_timm, memory_efficient=True), "timm"),
    "graph_plain": Method("a CUDA graph of `plain`", partial(_ours, efficient="plain"), as_cuda_graph=True),
    "graph_shared": Method("a CUDA graph of `shared`", partial(_ours, efficient="shared"), as_cuda_graph=True),
    "compile_plain": Method("`torch.compile` of `plain`", partial(_compiled, efficient="plain")),
    "compile_shared": Method("`torch.compile` of `shared`", partial(_compiled, efficient="shared")),
}


def choose(names: list[str], model: str, device: str = "cpu") -> list[str]:
    """Return the methods `names` that can run here, plain first, and print the reason for each that cannot."""
    for name in names:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}: there are {', '.join(METHODS)}")
    chosen = ["plain", *(name for name in METHODS if name in names and name != "plain")]
    reasons = {name: reason for name in chosen if (reason := unavailable_reason(name, model, device))}
    for name, reason in reasons.items():
        print(f"{name} left out: {reason}")
    return [name for name in chosen if name not in reasons]


def unavailable_reason(name: str, model: str, device: str = "cpu") -> str | None:
    """Return why the method `name` cannot train `model` here, or None if it can."""
    package = METHODS[name].package
    if METHODS[name].as_cuda_graph and not device.startswith("cuda"):
        return f"CUDA graphs need a GPU, and the device is {device}"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    arguments = architecture(model)
    is_standard = arguments["bn_size"] == 4 and arguments["compression"] == 0.5
    if package in ("torchvision", "timm") and not is_standard:
        return f"{package} has no DenseNet without bottlenecks or compression, as {model} is"
    if package == "timm" and arguments["num_init_features"] != 2 * arguments["growth_rate"]:
        return f"timm's stem has 2 × growth_rate channels, and that of {model} has not"
    return None
