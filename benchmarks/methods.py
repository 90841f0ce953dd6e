"""The configurations that are measured, and the methods that are compared in each.

The methods are DenseNets of this package and of torchvision; ours compiled, or as CUDA graphs.
"""

import importlib
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from efficient_densenet import CheckpointFunction, DenseNet, FCDenseNet, kernels, make_efficient
from efficient_densenet.models.layers import DenseLayer
from efficient_densenet.models.zoo import FC_VARIANTS, VARIANTS

PRECISIONS = ("float32", "tf32", "bf16", "fp16")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Setting:
    """The configuration that all methods of one comparison share."""

    model: str
    batch_size: int
    image_size: int | str
    precision: str
    layout: str
    device: str
    threads: int
    inference: bool = False
    devices: int = 1
    card_gb: int = 0

    @property
    def image_shape(self) -> list[int]:
        """Channels and sizes: of a 32 3×32×32, of 1x96x96x96 a volume's."""
        size = self.image_size
        return [3, size, size] if isinstance(size, int) else [int(number) for number in size.split("x")]


def expand(
    model: Any,
    batch_size: Any,
    image_size: int | str = 0,
    precision: Any = "float32",
    layout: Any = "contiguous",
    device: str = "cpu",
    threads: int = 0,
    inference: bool = False,
    devices: Any = 1,
    card_gb: Any = 0,
) -> list[Setting]:
    """Return all combinations of the given models, batch sizes, precisions, layouts, numbers of devices and sizes of
    cards."""
    for name in as_list(precision):
        _check("precision", name, PRECISIONS)
        if name == "tf32" and not device.startswith("cuda"):
            raise ValueError(f"precision 'tf32' needs a CUDA device, found {device!r}: take 'float32' or 'bf16'")
    for name in as_list(layout):
        _check("layout", name, LAYOUTS)
    sizes = {name: image_size or default_image_size(name) for name in as_list(model)}
    threads = threads or torch.get_num_threads()
    combinations = itertools.product(*map(as_list, (list(sizes), batch_size, precision, layout, devices, card_gb)))
    return [
        Setting(name, int(batch), sizes[name], numbers, memory_format, device, threads, inference, count, card)
        for name, batch, numbers, memory_format, count, card in combinations
    ]


def as_list(value: Any) -> list[Any]:
    """Return the values of an option: `8,64` is parsed as a tuple, `8` as a number, and names stay text."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return list(value) if isinstance(value, tuple | list) else [value]


def architecture(model: str) -> dict[str, Any]:
    """Return the arguments of `DenseNet` or `FCDenseNet` for a zoo model, or for any densenet_bc_<depth>_<growth rate>,
    each perhaps with another activation: densenet121+silu."""
    model, _, activation = model.partition("+")
    if activation:
        return architecture(model) | {"activation": activation}
    if model in VARIANTS or model in FC_VARIANTS:
        return (VARIANTS | FC_VARIANTS)[model]
    match = re.fullmatch(r"densenet_bc_(\d+)_(\d+)", model)
    depth, growth_rate = (int(number) for number in match.groups()) if match else (0, 0)
    if depth < 10 or (depth - 4) % 6 or not growth_rate:
        raise ValueError(
            f"unknown model {model!r}: take one of the zoo's ({', '.join(VARIANTS)}) or "
            "densenet_bc_<depth>_<growth rate> with a depth of 6n + 4"
        )
    return VARIANTS["densenet_bc_100_12"] | {
        "growth_rate": growth_rate,
        "block_config": ((depth - 4) // 6,) * 3,
        "num_init_features": 2 * growth_rate,
    }


def default_image_size(model: str) -> int:
    """Return the height and width of the images of CIFAR or ImageNet, whichever the model is for."""
    return 32 if architecture(model).get("small_inputs", True) else 224


def _check(option: str, name: str, allowed: Iterable[str]) -> None:
    if name not in allowed:
        raise ValueError(f"unknown {option} {name!r}: there are {', '.join(allowed)}")


class Method(NamedTuple):
    """A way to run a model.

    Attributes:
        build: from arguments of `DenseNet` to a model.
        package: what must be installed.
        as_cuda_graph: whether forward, loss and backward run as one CUDA graph.
        layout: of weights and images in the place of the setting's, so that plain in another one is the reference.
    """

    build: Callable[[dict[str, Any]], nn.Module]
    package: str = "efficient_densenet"
    as_cuda_graph: bool = False
    layout: str = ""


def _ours(arguments: dict[str, Any], **overrides: Any) -> nn.Module:
    network = DenseNet if "compression" in arguments else FCDenseNet
    return network(**(arguments | overrides))


def _portable(arguments: dict[str, Any]) -> nn.Module:
    kernels.numba_supports = kernels.triton_supports = lambda values: False  # this process measures nothing else
    return _ours(arguments, efficient="shared")


class _CheckpointFunctionLayer(DenseLayer):
    """A layer as in the code that this project began with, which passes parameters along with what it recomputes."""

    def first_half(self, *features: Tensor) -> Tensor:
        parameters = *self.norm1.parameters(), *self.conv1.parameters()
        return CheckpointFunction.apply(super().first_half, len(features), *features, *parameters)


def _checkpoint_function(arguments: dict[str, Any]) -> nn.Module:
    model = _ours(arguments, efficient="plain")
    for layer in model.modules():
        if type(layer) is DenseLayer:
            layer.__class__ = _CheckpointFunctionLayer
    return model


def _compiled(arguments: dict[str, Any], efficient: str, mode: str = "default") -> nn.Module:
    compiled: Any = torch.compile(_ours(arguments, efficient=efficient), fullgraph=True, mode=mode)
    return compiled


def _torchvision(arguments: dict[str, Any], memory_efficient: bool) -> nn.Module:
    shape = {name: arguments[name] for name in ("growth_rate", "block_config", "num_init_features", "num_classes")}
    model = importlib.import_module("torchvision.models").DenseNet(**shape, memory_efficient=memory_efficient)
    return _with_small_stem(arguments, model)


def _torchvision_converted(arguments: dict[str, Any]) -> nn.Module:
    model = _torchvision(arguments, memory_efficient=False)
    make_efficient(model, "shared")
    return model


def _with_small_stem(arguments: dict[str, Any], model: Any) -> nn.Module:
    """Replace the ImageNet stem, the only one of torchvision, by a single 3×3 convolution for small inputs."""
    if arguments["small_inputs"]:
        model.features.conv0 = nn.Conv2d(3, arguments["num_init_features"], 3, padding=1, bias=False)
        for name in {"norm0", "relu0", "pool0"} & set(model.features._modules):
            setattr(model.features, name, nn.Identity())
    return model


METHODS: dict[str, Method] = {
    "plain": Method(partial(_ours, efficient="plain")),
    "shared": Method(partial(_ours, efficient="shared")),
    "shared_keep": Method(partial(_ours, efficient="shared", keep_bottleneck=True)),
    "shared_portable": Method(_portable),
    "checkpoint": Method(partial(_ours, efficient="checkpoint")),
    "official": Method(partial(_ours, efficient="official")),
    "checkpoint_function": Method(_checkpoint_function),
    "torchvision": Method(partial(_torchvision, memory_efficient=False), "torchvision"),
    "torchvision_efficient": Method(partial(_torchvision, memory_efficient=True), "torchvision"),
    "torchvision_converted": Method(_torchvision_converted, "torchvision"),
    "graph_plain": Method(partial(_ours, efficient="plain"), as_cuda_graph=True),
    "graph_shared": Method(partial(_ours, efficient="shared"), as_cuda_graph=True),
    "compile_plain": Method(partial(_compiled, efficient="plain")),
    "compile_plain_reduce_overhead": Method(partial(_compiled, efficient="plain", mode="reduce-overhead")),
    "compile_shared": Method(partial(_compiled, efficient="shared")),
}
METHODS |= {
    f"{name}_channels_last": METHODS[name]._replace(layout="channels_last")
    for name in ("plain", "shared", "compile_plain")
}
ORDINARY = [name for name in METHODS if not METHODS[name].layout]
"""Methods that are measured by default."""


def choose(names: list[str], setting: Setting) -> list[str]:
    """Return the methods `names` that can run here, plain first, and print the reason for each that cannot."""
    for name in names:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}: there are {', '.join(METHODS)}")
    chosen = ["plain", *(name for name in METHODS if name in names and name != "plain")]
    reasons = {name: reason for name in chosen if (reason := unavailable_reason(name, setting))}
    for name, reason in reasons.items():
        print(f"{name} left out: {reason}")
    return [name for name in chosen if name not in reasons]


def unavailable_reason(name: str, setting: Setting) -> str | None:
    """Return why the method `name` cannot run here, or None if it can."""
    package = METHODS[name].package
    has_graphs = METHODS[name].as_cuda_graph or name.endswith("reduce_overhead")
    if has_graphs and not setting.device.startswith("cuda"):
        return f"CUDA graphs need a GPU, and the device is {setting.device}"
    if METHODS[name].as_cuda_graph and (setting.inference or setting.devices > 1):
        return "a CUDA graph is one of a training step on one device"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    model, arguments = setting.model, architecture(setting.model)
    is_standard = arguments.get("bn_size") == 4 and arguments["compression"] == 0.5
    if package == "torchvision" and not (is_standard and isinstance(setting.image_size, int)):
        return f"{package} has no DenseNet without bottlenecks or compression, or of other inputs, as {model} is"
    return None
