"""`model.features`: the stem, dense blocks, transitions and the last norm, one after another."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import check, choice
from ..engine.network import run_sequence
from ..engine.parts import Norm
from .activations import RELU, ActivationFactory, activation_factory
from .backbone import FeatureInfo
from .dimensions import CONVOLUTIONS, NORMS, modules_for
from .layers import DenseBlock, Transition


class Features(nn.Sequential):
    """Runs its modules one after another, and a block together with its consumer if possible.

    Returns the last module's output, or a tuple of the outputs of the modules that `taps` names.
    """

    norm5: Norm  # missing in a backbone that ends before it

    def __init__(self, modules: OrderedDict[str, nn.Module], taps: Sequence[str] = ()) -> None:
        super().__init__(modules)
        self.taps = tuple(taps)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        modules = [(name, module) for name, module in self._modules.items() if name != "relu5"]
        x, outputs = run_sequence(modules, x, lambda module: isinstance(module, DenseBlock), self.taps)
        if "norm5" in outputs:
            outputs["norm5"] = self.last_activation(outputs["norm5"])
        return tuple(outputs[name] for name in self.taps) if self.taps else x

    @property
    def last_activation(self) -> Callable[[Tensor], Tensor]:
        """The activation after the last norm. `forward` does not apply it, as in torchvision; another activation than
        ReLU is a module here, `relu5`, which may have a weight."""
        return cast("dict[str, Any]", self._modules).get("relu5", F.relu)

    def tapped(self, info: FeatureInfo) -> "Features":
        """The same modules, up to the last module that `info` names; the result returns the outputs that `info`
        names."""
        names = [name.removeprefix("features.") for name in info.module_name()]
        last, *inside = info.module_name(max(info.out_indices)).removeprefix("features.").split(".")
        modules = OrderedDict(list(self._modules.items())[: list(self._modules).index(last) + 1])
        if last == "norm5" and "relu5" in self._modules:
            modules["relu5"] = self._modules["relu5"]
        if inside:
            transition = cast(Transition, modules[last])
            modules[last] = nn.Sequential(OrderedDict(norm=transition.norm, relu=transition.relu))
            modules[last].training = transition.training
        tapped = Features(modules, names)
        tapped.training = self.training  # only its own: the children's modes may differ
        return tapped


def build_features(
    block_config: Sequence[int],
    num_init_features: int,
    compression: float,
    strides: Sequence[int],
    make_block: Callable[[int, int], DenseBlock],
    *,
    in_channels: int,
    small_inputs: bool,
    dims: int,
    activation: str | ActivationFactory = "relu",
) -> tuple[Features, FeatureInfo]:
    """The modules and a description of the feature maps; `make_block` takes a number of layers and of channels."""
    make_activation, modules = activation_factory(activation), modules_for(dims)
    if small_inputs:
        conv0 = modules.Conv(in_channels, num_init_features, kernel_size=3, padding=1, bias=False)
        features = Features(OrderedDict(conv0=conv0))
    else:
        conv0 = modules.Conv(in_channels, num_init_features, kernel_size=7, stride=2, padding=3, bias=False)
        pool0 = modules.MaxPool(kernel_size=3, stride=2, padding=1)
        stem = OrderedDict(conv0=conv0, norm0=NORMS[dims](num_init_features), relu0=make_activation(), pool0=pool0)
        features = Features(stem)
    channels = num_init_features
    info = [_map_info(channels, 1 if small_inputs else 2, "conv0" if small_inputs else "relu0")]
    for i, num_layers in enumerate(block_config, start=1):
        block = make_block(num_layers, channels)
        features.add_module(f"denseblock{i}", block)
        channels = block.num_output_features
        info.append(_map_info(channels, strides[i - 1], f"denseblock{i}"))
        if i < len(block_config):
            compressed = max(int(channels * compression), 1)
            features.add_module(f"transition{i}", Transition(channels, compressed, dims, activation=activation))
            channels = compressed
    features.add_module("norm5", NORMS[dims](channels))
    if make_activation is not RELU:  # features.relu5, which `forward` leaves to the model
        activation_module: Any = make_activation()
        if hasattr(activation_module, "inplace"):
            activation_module.inplace = False
        features.add_module("relu5", activation_module)
    info[-1] = _map_info(channels, strides[-1], "norm5")
    return features, FeatureInfo(info, range(len(info)))


def block_strides(num_blocks: int, small_inputs: bool, output_stride: int | None) -> list[int]:
    """The stride of each block's feature map with respect to the input."""
    strides = [(1 if small_inputs else 4) * 2**i for i in range(num_blocks)]
    if output_stride is None:
        return strides
    check("output_stride", output_stride, choice(*strides))
    return [min(stride, output_stride) for stride in strides]


def dilate(features: Features, strides: Sequence[int]) -> None:
    """Replace pooling by dilation: where a block has the stride of the block before it, the transition between them
    does not pool, and all later 3×3 convolutions get twice the dilation."""
    dilation = 1
    for i, (before, after) in enumerate(pairwise(strides), start=1):
        if after == before:
            features.get_submodule(f"transition{i}").pool = nn.Identity()
            dilation *= 2
        for module in features.get_submodule(f"denseblock{i + 1}").modules():
            if isinstance(module, CONVOLUTIONS) and set(module.kernel_size) == {3}:
                module.dilation = module.padding = (dilation,) * len(module.kernel_size)


def _map_info(channels: int, reduction: int, module: str) -> dict[str, Any]:
    return {"num_chs": channels, "reduction": reduction, "module": f"features.{module}"}
